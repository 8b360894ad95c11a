"""Snapshots, exports of the published model as safetensors, and restore and rollback of a run's directory.

May import: learners, merging, rounds, storage.
"""
