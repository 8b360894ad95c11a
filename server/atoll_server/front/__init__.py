"""A front, the gateway of one region.

It serves and calls the core's service. No work is lost when a front loses its state.

`fetch_cache` keeps updates, `core_connection` dials the core, and `pass_through` forwards operators' calls.

May import: access, rpc, settings.
"""
