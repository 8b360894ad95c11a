"""The agent: a thread beside training that joins the run, sends contributions, and fetches published updates.

`run_session` joins and rejoins, `shard_session` follows and reports; `join_request` is one Join call.

May import: errors, fragments, stats.
"""
