"""A run in virtual time around the real syncer: islands that step, links that take time, failures.

May import: nothing.
"""
