"""Writes and reads snapshots, exports the published model as safetensors, and restores or rolls back a run.

May import: learners, merging, rounds, storage.
"""
