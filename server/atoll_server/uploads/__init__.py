"""A shard's unfinished uploads of contributions.

`admission` decides whether an upload may begin, `upload_state` is the table of its states, and `uploads` keeps uploads
and the newest receipts. `shard.intake` follows a contribution through its upload.

May import: access, rounds, shard_context, storage.
"""
