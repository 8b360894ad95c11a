"""The assignment of parameters to fragments, and of parts of fragments to frames.

May import: errors.
"""
