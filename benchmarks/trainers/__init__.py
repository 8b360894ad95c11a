"""Repeats what users do: `first_merge` runs the examples, and `loops` runs loops with other optimizers and precisions.

May import: conditions.
"""
