"""Manages a run's fragments: receives contributions, publishes updates and takes snapshots.

`shard` carries out the syncer's decisions, `intake` receives contributions and `snapshotter` takes snapshots.

May import: access, checkpoints, data, learners, ledger, merging, rounds, rpc, shard_context, storage, telemetry,
uploads.
"""
