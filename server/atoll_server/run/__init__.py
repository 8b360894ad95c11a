"""A run and its core process. `core` starts and stops the process. `registrar` manages learners and pauses the run.

May import: access, checkpoints, data, learners, merging, rounds, settings, shard, storage, telemetry.
"""
