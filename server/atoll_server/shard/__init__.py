"""The fragments of a run: uploads, rounds carried out by the engine, published updates, readers, snapshots.

May import: access, checkpoints, learners, merging, rounds, rpc, settings, storage, telemetry.
"""
