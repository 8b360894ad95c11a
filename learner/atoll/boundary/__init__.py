"""Work of the training thread at step boundaries: parameters, optimizer copies, and detection of other writes.

May import: data, device, errors, fragments, ranks, stats.
"""
