"""Learners of a run: names, incarnations, sessions, time accounts (goodput), and plausibility of reports.

`learner_registry` fences names; `goodput` counts learner time.

May import: access.
"""
