"""Callers: their identities, rights and quotas, and how a call is refused.

Certificates, operator tokens, quotas and limits on readers. `audit_log` records joins, refusals and operator actions.

May import: nothing.
"""
