"""The agent: a second thread that joins the run, sends contributions, and fetches published updates.

`run_session` joins and rejoins. `shard_session` follows and reports. `join_request` makes one Join call.

May import: errors, fragments, stats.
"""
