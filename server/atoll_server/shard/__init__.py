"""A run's fragments. Receives contributions, publishes updates, and takes snapshots.

`shard` carries out the syncer's decisions, `context` contains a shard's dependencies, and `work` owns a shard's threads
and tasks.

May import: access, checkpoints, data, learners, ledger, merging, rounds, rpc, settings, storage, telemetry.
"""
