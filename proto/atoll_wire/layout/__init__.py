"""The assignment of parameters to fragments, of parts of fragments to frames, and of tensors to files.

May import: errors.
"""
