"""Connects a front to the core: selects the shard that receives a call and manages the connections to its address.

`routes` selects the shard. `core_connection` dials an address and dials again if it no longer answers.
`known_sessions` remembers the sessions that a shard accepted.

May import: access.
"""
