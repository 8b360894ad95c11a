"""What a learner costs its training loop: throughput while it syncs, and the time in `step()` when a round is due.

May import: conditions.
"""
