"""The step boundary, on the training thread: parameters, optimizer copies, ranks, and what moved the parameters.

May import: errors, fragments, stats.
"""
