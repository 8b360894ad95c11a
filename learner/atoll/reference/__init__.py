"""The reference learner: a small byte-level language model in a plain training loop.

May import: errors, learner, stats.
"""
