"""The core: outer optimizer, rounds, ledger, and the gRPC service. Imports neither torch nor the learner."""
