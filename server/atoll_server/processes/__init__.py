"""The core processes of a run. One contains the registrar, and each of the others contains only a shard.

`core_process` contains the parts that all of them share, from start to stop. `core` is the process with the registrar,
and `shard_core` is a process with only a shard. `attachment` keeps a shard attached to the registrar, and `replica` is
the shard's durable copy of the registrar's decisions. `trial_start` restores a run as a starting core does, to verify
the run.

May import: access, checkpoints, learners, ledger, memory_budget, merging, rounds, run, settings, shard, shard_context,
storage, telemetry.
"""
