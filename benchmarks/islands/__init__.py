"""Benchmarks of learners with several ranks: memory of a rank, and time in `Learner.step()`.

May import: conditions.
"""
