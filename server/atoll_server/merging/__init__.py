"""The numerics of a merge: the weighted sum of contributions, the outer optimizer step, and the limits on norms.

`merge` has the formula of a contribution's weight, and merges a fragment. `merge_kernels` computes each frame, with its
Nesterov step. `norm_limit` refuses contributions.

May import: rounds.
"""
