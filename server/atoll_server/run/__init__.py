"""A run, and the core, the process that owns it. `registrar` pauses the run, and admits and evicts learners.

May import: access, checkpoints, learners, merging, rounds, settings, shard, storage, telemetry.
"""
