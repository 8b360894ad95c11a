"""A run, and the core, which is the process that owns it. `registrar` pauses the run, admits and evicts learners.

May import: access, checkpoints, learners, merging, rounds, settings, shard, storage, telemetry.
"""
