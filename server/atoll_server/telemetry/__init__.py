"""A run's journal and its subscribers: metrics, the timeline of rounds, events for people and logs.

`entries` lists all kinds of entries, and `journal` passes entries to subscribers.

May import: access, ledger, rounds, rpc.
"""
