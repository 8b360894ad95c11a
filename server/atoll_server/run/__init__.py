"""A run, and the core, which is the process that owns the run. `registrar` pauses runs, and admits and evicts learners.

May import: access, checkpoints, learners, merging, rounds, settings, shard, storage, telemetry.
"""
