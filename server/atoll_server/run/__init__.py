"""A run: its learners, datasets, attached shards, joins, reports and problems.

`registrar` manages learners and pauses the run. `datasets` leases data units to learners. `known_run` represents a run
as one core process knows it. `troubles` finds the problems that `atoll status` shows, except those of silent fronts,
which `links.links` finds.

May import: access, checkpoints, data, learners, ledger, links, memory_budget, rounds, settings, shard, shard_context,
storage, telemetry.
"""
