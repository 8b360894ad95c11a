"""What makes work durable: the ledger (SQLite), its single writer, the spool of payloads, and part files.

`disk` is the only module here that touches the file system; `crash_points` names where tests kill the process.

`payload_writer` makes a payload durable; `spool` holds the durable payloads.

May import: rounds.
"""
