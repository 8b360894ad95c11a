"""The gRPC services of a core (learners, operators, doctor), its status, its gauges, and the server process.

May import: access, checkpoints, learners, rounds, rpc, run, settings, shard, storage, telemetry.
"""
