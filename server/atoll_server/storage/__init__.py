"""What makes work durable: the ledger (SQLite), its single writer, the spool of payloads, and part files.

`disk` is the only module here that touches the file system; `crash_points` names where tests kill the process.

May import: rounds.
"""
