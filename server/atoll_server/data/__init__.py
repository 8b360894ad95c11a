"""Accounts for data units: which units learners hold and which are consumed. Pure: no clock, IO or threads.

`accounts` defines the rules, and `merged_units` sums up the merges of one fragment. `run.datasets` leases units to
learners by these rules.

May import: nothing.
"""
