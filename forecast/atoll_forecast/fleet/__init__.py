"""A run in virtual time with the core's syncer, simulated steps, link delays and failures.

May import: nothing.
"""
