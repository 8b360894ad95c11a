"""A front: the gateway of one region. It speaks the core's service up and down, and keeps nothing it cannot lose.

`fetch_cache` keeps updates; `core_connection` dials the core; `pass_through` forwards operators' calls.

May import: access, rpc, settings.
"""
