"""A run, and the core, the process that has it. `registrar` pauses it, and admits and evicts learners.

May import: access, checkpoints, learners, merging, rounds, settings, shard, storage, telemetry.
"""
