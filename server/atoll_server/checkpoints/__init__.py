"""Writes and reads snapshots, exports the published model as safetensors, and restores or rolls back a run.

`parameter_source` reads the model that `--init` names.

May import: learners, ledger, merging, rounds, storage.
"""
