"""The dashboard's view of the run: the client of the core, the newest answers, rates and histories.

May import: models.
"""
