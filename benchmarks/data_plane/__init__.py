"""What `make bench` measures: codec and merge, outer syncs, a learner's throughput, idle learners, and a front's cost.

May import: nothing.
"""
