"""`atoll demo`: runs real processes on one machine, and kills a learner, the core and, with regions, a front.

May import: reference.
"""
