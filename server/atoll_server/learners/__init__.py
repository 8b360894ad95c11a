"""Learners of a run: names, incarnations, sessions, time accounts (goodput), and plausibility of reports.

`learner_registry` fences names, and `goodput` accounts for learner time.

May import: access.
"""
