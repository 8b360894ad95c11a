"""Snapshots of the published model, exports as safetensors, and the restore and rollback of a run's directory.

May import: learners, merging, rounds, storage.
"""
