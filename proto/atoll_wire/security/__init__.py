"""TLS or plain text of a connection, and what a certificate says about its owner.

May import: errors.
"""
