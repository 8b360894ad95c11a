"""A front: the gateway of one region. It speaks the core's service up and down, and keeps nothing it cannot lose.

May import: access, rpc, settings.
"""
