"""The numerics of a merge: the weighted sum of contributions, the outer optimizer step and the limits on norms.

`merge` defines the formula for a contribution's weight, which `rounds.round_state` applies, and merges a fragment.
`merge_kernels` computes the sum and the Nesterov step of each frame. `norm_limit` decides which contributions are
refused or clipped because of their norm.

May import: rounds.
"""
