"""`atoll demo`: runs real processes on one machine and kills one of each kind, such as a learner and the core.

May import: reference.
"""
