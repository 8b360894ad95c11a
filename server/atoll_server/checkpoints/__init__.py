"""Writes and reads snapshots, exports the published model as safetensors, and restores or rolls back a run.

`restore` loads a run's state when a core starts. `rollback` starts a new generation at an older snapshot.
`parameter_source` reads the model at the path in `--init`.

May import: learners, ledger, merging, rounds, storage.
"""
