"""Callers: who they are, what they may do, how much they may use, and how a call is refused.

Certificates, operator tokens, quotas and limits on readers. `audit_log` records joins, refusals and operator actions.

May import: nothing.
"""
