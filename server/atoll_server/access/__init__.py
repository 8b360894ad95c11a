"""Identifies the callers of a core or a front, checks their rights and quotas, and refuses calls.

The modules handle certificates, operator tokens, quotas, and limits on the versions that learners read. `audit_log`
records joins, refusals and operator actions.

May import: nothing.
"""
