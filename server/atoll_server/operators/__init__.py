"""Shows the state of a run to operators and carries out their actions, over all shards of the run.

`status` and `gauges` show a run's state. `receipt_pages` lists receipts, `run_checkpoints` takes checkpoints, and
`model_export` exports the model. `shard_calls` sends requests to the run's other shards.

May import: access, checkpoints, learners, ledger, links, processes, rounds, run, settings, shard, storage, telemetry,
uploads.
"""
