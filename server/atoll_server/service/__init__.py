"""A core's gRPC services (learners, operators, doctor), its status and gauges, and the server process.

May import: access, checkpoints, learners, rounds, rpc, run, settings, shard, shard_process, storage, telemetry.
"""
