"""Benchmarks of learners whose parameters are on a GPU: coding there, and training with a learner vs. without.

May import: conditions, data_plane.
"""
