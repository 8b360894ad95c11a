"""The parts of `make bench`: codec and merge, outer syncs, a learner's throughput, idle learners, a front's cost.

May import: conditions.
"""
