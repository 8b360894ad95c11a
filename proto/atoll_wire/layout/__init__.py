"""Which parameters are in which fragment, and which part of a fragment is in which frame.

May import: errors.
"""
