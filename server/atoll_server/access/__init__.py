"""Identifies the callers of a core or a front, checks their rights and quotas, and refuses calls.

`identity` checks the role and the name in a caller's certificate, `tokens` checks operators' tokens, and
`certificate_authority` issues certificates. `revocations` refuses revoked certificates, and `reread_file` reads lists
again after each change. `quotas` counts each caller's calls for `rpc.limiter`. `reader_limits`
limits the old versions that callers read. `audit_log` records joins, refusals and operator actions.

May import: nothing.
"""
