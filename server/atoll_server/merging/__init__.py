"""The numerics of a merge: the weighted sum of contributions, the outer optimizer step, and the limits on norms.

May import: rounds.
"""
