"""The fragments of a run: the intake of contributions, uploads and their states, published updates, readers, snapshots.

`shard` carries out what the syncer decides; `context` has its dependencies, `work` owns its threads and tasks.

May import: access, checkpoints, learners, merging, rounds, rpc, settings, storage, telemetry.
"""
