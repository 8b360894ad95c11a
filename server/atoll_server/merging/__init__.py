"""The numerics of a merge: weighted combination, outer optimizer step, and the limit on norms.

May import: rounds.
"""
