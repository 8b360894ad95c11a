"""The step boundary, on the training thread: parameters, optimizer copies, ranks, and detection of other writes.

May import: errors, fragments, stats.
"""
