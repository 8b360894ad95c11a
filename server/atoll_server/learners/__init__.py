"""Learners of a run: names, incarnations, sessions, time accounts (goodput), and how far reports are believed.

`learner_registry` fences names; `goodput` counts learner time.

May import: access.
"""
