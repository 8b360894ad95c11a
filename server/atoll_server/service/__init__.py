"""A core's gRPC services (learners, readers, operators, doctor), its status and gauges, and the server process.

May import: access, checkpoints, learners, merging, rounds, rpc, run, settings, shard, shard_process, storage,
telemetry.
"""
