"""Links between regions, emulated in network namespaces: uploads over one, and a run in three regions. Needs root.

May import: data_plane.
"""
