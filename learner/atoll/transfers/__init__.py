"""Transfers over one connection: retries of uploads and fetches, remedies for errors, and resumption of fetches.

Learners and followers share this package. `agent.shard_session` replaces lost connections.

May import: errors, fragments.
"""
