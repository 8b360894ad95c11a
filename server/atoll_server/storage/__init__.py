"""What makes work durable: the ledger (SQLite), its single writer, and the spool of payloads.

`disk` is the only module here that touches the file system; `crash_points` names where tests kill the process.

May import: access, rounds.
"""
