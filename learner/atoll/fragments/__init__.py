"""A fragment at a learner: where its values lie, what becomes of them, and how the two threads exchange them.

May import: nothing.
"""
