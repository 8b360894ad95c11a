"""The process of a shard whose registrar is another process.

`shard_core` starts and stops the process, `attachment` keeps it attached to the registrar, and `replica` is its durable
copy of the registrar's decisions.

May import: access, checkpoints, learners, run, settings, shard, storage, telemetry.
"""
