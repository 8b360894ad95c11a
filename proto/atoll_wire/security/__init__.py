"""TLS or plain text of connections, and the identities in certificates.

May import: errors.
"""
