"""A run from start to stop: its directory, joining, first parameters, reports, eviction, pausing.

May import: access, checkpoints, learners, merging, rounds, settings, shard, storage, telemetry.
"""
