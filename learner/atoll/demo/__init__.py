"""`atoll demo`: runs real processes on one machine, and kills a learner, the core and, if there are any,
shards and fronts.

May import: reference.
"""
