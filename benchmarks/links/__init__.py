"""Benchmarks over emulated links in network namespaces: uploads over one link, and a run in three regions. Needs root.

May import: conditions, data_plane, peers, process_state.
"""
