"""Work of the training thread at step boundaries: pseudo-gradients, adoptions, and detection of other writes.

`step_boundary` orders the work. `round_answers` takes a pseudo-gradient for a round or declines the round.
`local_parameters` computes pseudo-gradients and adopts updates, through `host_values` or `device_values`.
`movement_watch` detects values that the optimizer did not write. `replicas` compares values that several ranks hold.

May import: data, device, errors, fragments, model, ranks, stats.
"""
