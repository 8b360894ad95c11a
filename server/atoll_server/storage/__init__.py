"""Durable storage: the disk and the spool of payloads with its unfinished uploads.

`disk` is the only module here that writes to the file system. `crash_points` names points at which tests kill the
process. `payload_writer` writes a payload during its upload and makes it durable. `spool` finds and deletes payloads.

May import: rounds.
"""
