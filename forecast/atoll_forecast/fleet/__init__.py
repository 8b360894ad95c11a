"""A run in virtual time with the real syncer, simulated steps, link delays and failures.

May import: nothing.
"""
