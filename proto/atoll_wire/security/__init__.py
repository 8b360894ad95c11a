"""Connections with TLS or plain text, and the identities in certificates.

`transport` opens connections, and uses a certificate's files again when they change.

May import: errors.
"""
