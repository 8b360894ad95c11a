"""A shard's unfinished uploads of contributions.

`admission` decides whether an upload may begin, `upload_state` defines the states of an upload, and `uploads` keeps
uploads and the newest receipts. `shard.intake` follows a contribution through its upload.

May import: access, rounds, shard_context, storage.
"""
