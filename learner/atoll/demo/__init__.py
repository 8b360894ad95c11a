"""`atoll demo`: runs real processes on one machine, and kills a learner, the core and a front.

May import: reference.
"""
