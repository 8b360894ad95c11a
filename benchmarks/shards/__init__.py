"""Runs over several shards: the cost of a sync, idle shards and learners, and a model of 1.2 billion parameters.

May import: conditions, data_plane, interface_bytes.
"""
