"""A core's gRPC services (learners, readers, fronts, operators, doctor, attached shards), and the server process.

May import: access, checkpoints, learners, merging, operators, processes, rpc, run, settings, shard, telemetry, uploads.
"""
