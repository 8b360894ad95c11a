"""Callers of a core or a front: their identities, rights and quotas, and the refusal of calls.

The modules handle certificates, operator tokens, quotas and limits on readers. `audit_log` records joins, refusals and
operator actions.

May import: nothing.
"""
