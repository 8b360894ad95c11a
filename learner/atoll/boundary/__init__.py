"""The step boundary, on the training thread: parameters and optimizer state, ranks, and what moved the parameters.

May import: errors, fragments, stats.
"""
