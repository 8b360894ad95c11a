"""`atoll demo`: a run of real processes on one machine, in which a learner, the core and a front are killed.

May import: reference.
"""
