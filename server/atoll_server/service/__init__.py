"""A core's gRPC services (learners, readers, operators, doctor), its status and gauges, and the server process.

May import: access, checkpoints, learners, ledger, merging, processes, rounds, rpc, run, settings, shard, storage,
telemetry.
"""
