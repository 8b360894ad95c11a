"""Learners of a run: names, incarnations, sessions, time accounts (goodput), and plausibility of reports.

`learner_registry` lets one process at a time use a name, and `goodput` accounts for learner time.

May import: access.
"""
