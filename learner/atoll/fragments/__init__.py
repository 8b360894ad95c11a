"""A fragment at a learner: the memory of its values, adoption, and the exchange between the two threads.

May import: nothing.
"""
