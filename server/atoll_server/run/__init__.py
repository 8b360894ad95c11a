"""A run: its registrar, joining, first parameters and reports; and the core, the process that owns the run.

May import: access, checkpoints, learners, merging, rounds, settings, shard, storage, telemetry.
"""
