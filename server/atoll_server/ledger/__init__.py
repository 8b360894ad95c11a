"""The ledger: an SQLite database with a run's learners, contributions, merges, snapshots and data units.

`database` opens it, and a running core writes through `ledger_writer`. `run_ledger`, `shard_ledger` and `data_ledger`
have its tables, and `rows` its rows. `lineage` reads a generation's history, and `manifests` a run's checkpoints.

May import: data, rounds, storage.
"""
