"""The core: outer optimizer, rounds, ledger, and the gRPC service.

This package imports neither torch nor the learner.
"""

import atoll_wire as atoll_wire  # must come before any import of grpc (see `atoll_wire.forking`)
