"""What operators see of a run, and what they do with it, over all its shards.

`status` and `gauges` show a run's state. `receipt_pages` lists receipts, `run_checkpoints` takes checkpoints, and
`model_export` exports the model. `shard_calls` calls the run's other shards.

May import: access, checkpoints, learners, ledger, links, processes, rounds, run, settings, shard, storage, telemetry,
uploads.
"""
