"""Work of the training thread at step boundaries: pseudo-gradients, adoptions, and detection of other writes.

`step_boundary` orders the work. `local_parameters` takes pseudo-gradients and adopts updates, through `host_values` or
`device_values`.

May import: data, device, errors, fragments, model, ranks, stats.
"""
