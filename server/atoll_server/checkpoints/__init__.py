"""Writes and reads snapshots, exports the published model as safetensors, and restores or rolls back a run.

`snapshot` writes and reads one snapshot, and `shard.snapshotter` decides when. `restore` loads a run's state when a
core starts. `rollback` implements `atoll checkpoint restore`: it starts a new generation at an older snapshot.
`parameter_source` reads the model at the path in `--init`.

May import: learners, ledger, merging, rounds, storage.
"""
