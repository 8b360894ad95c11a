"""The agent: a second thread that joins the run, sends contributions, and fetches published updates.

`run_session` joins the run and joins again after an outage. `shard_session` connects to one shard, reconnects after an
interruption, receives notifications and reports progress. `join_request` makes the Join calls. `unit_leasing`
requests data units until the core answers. `sending` and `fetching` repeat transfers with `transfers.retry_loop`.

May import: errors, fragments, ranks, stats, transfers.
"""
