"""A run over several shards of a model that is too large for a core and a learner on one machine.

May import: conditions, data_plane.
"""
