"""A core's gRPC services (for learners, readers, fronts, operators, doctor and attached shards) and its server process.

May import: access, checkpoints, learners, merging, operators, processes, rpc, run, settings, shard, telemetry, uploads.
"""
