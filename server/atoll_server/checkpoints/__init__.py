"""Snapshots, exports of the published model as safetensors, and restore and rollback of a run's directory.

`parameter_source` reads the model that `--init` names.

May import: learners, merging, rounds, storage.
"""
