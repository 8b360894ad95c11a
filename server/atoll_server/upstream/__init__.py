"""A front's way to the core: which shard receives a call, and the connections to its address.

`routes` selects the shard. `core_connection` dials an address and dials again if it no longer answers.
`known_sessions` remembers the sessions that a shard accepted.

May import: access.
"""
