"""The parts of `make bench`: codec and merge, outer syncs, idle learners, a front's cost.

May import: conditions, interface_bytes.
"""
