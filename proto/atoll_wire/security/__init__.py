"""Connections with TLS or plain text, and the identities in certificates.

May import: errors.
"""
