"""The journal of what happened, and what shows it: metrics, the timeline of rounds, events for people, logs.

`entries` lists what can happen; `journal` tells subscribers of it.

May import: access, rounds, rpc, storage.
"""
