"""A run over several shards: a model that no core of this machine could hold twice, and many small shards.

May import: data_plane.
"""
