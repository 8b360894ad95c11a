"""A run's fragments. Receives contributions, publishes updates, and takes snapshots.

`shard` carries out the syncer's decisions, `context` contains its dependencies, and `work` owns its threads and tasks.

May import: access, checkpoints, learners, merging, rounds, rpc, settings, storage, telemetry.
"""
