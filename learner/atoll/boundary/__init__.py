"""Work of the training thread at step boundaries: parameters, optimizer copies, and detection of other writes.

May import: errors, fragments, ranks, stats.
"""
