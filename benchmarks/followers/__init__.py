"""What followers behind fronts cost: `link` measures the bytes on a region's link, and `core` the core's CPU time.

May import: conditions, process_state, data_plane.
"""
