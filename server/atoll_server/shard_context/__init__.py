"""What a shard gets from its process: dependencies, threads and tasks, and the registrar's view of the run.

`context` contains a shard's dependencies, `work` owns its threads and tasks, and `run_view` is the view.

May import: learners, ledger, settings, storage, telemetry.
"""
