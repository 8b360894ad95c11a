"""Learners and cores that are killed: what goodput, loss and a restart cost.

May import: nothing.
"""
