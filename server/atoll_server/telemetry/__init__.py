"""The journal of a run, and its subscribers: metrics, the timeline of rounds, events for people, logs.

`entries` lists all kinds of entries; `journal` passes them to subscribers.

May import: access, rounds, rpc, storage.
"""
