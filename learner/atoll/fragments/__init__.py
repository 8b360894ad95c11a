"""A fragment at a learner: its values' memory, adoption, and the exchange between the two threads.

May import: nothing.
"""
