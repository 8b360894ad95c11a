"""The step boundary, on the training thread: parameters, optimizer copies, and detection of other writes.

May import: errors, fragments, ranks, stats.
"""
