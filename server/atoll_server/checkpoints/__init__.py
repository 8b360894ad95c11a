"""Snapshots of the published model, exports as safetensors, and bringing a run back from its directory.

May import: merging, rounds, storage.
"""
