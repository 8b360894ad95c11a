"""Accounts for data units: which units learners hold, and which are consumed. Pure: no clock, IO or threads.

`accounts` decides, and `merged_units` sums up the merges of one fragment. `run.datasets` makes the decisions durable.

May import: nothing.
"""
