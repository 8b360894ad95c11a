"""Snapshots of the published model, exports as safetensors, a run brought back from its directory, or rolled back.

May import: learners, merging, rounds, storage.
"""
