"""The ledger, an SQLite database that contains a run's learners, contributions, merges, snapshots and data units.

`database` opens the ledger, and a running core writes to it through `ledger_writer`. `run_ledger`, `shard_ledger` and
`data_ledger` read and write its tables, and `rows` defines their rows. `lineage` reads a generation's history, and
`manifests` reads a run's checkpoints.

May import: data, rounds, storage.
"""
