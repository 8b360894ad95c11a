"""A run in virtual time with the real syncer: learners that step, links that take time, failures.

May import: nothing.
"""
