"""Benchmarks over emulated links in network namespaces: uploads over one, and a run in three regions. Needs root.

May import: data_plane.
"""
