"""Learners of a run: names, incarnations, sessions, time accounts (goodput), and how far reports are believed.

May import: access.
"""
