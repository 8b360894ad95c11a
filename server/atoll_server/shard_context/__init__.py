"""The objects that a shard receives from its process: dependencies, threads, tasks and the registrar's view of the run.

`context` contains a shard's dependencies, `work` owns its threads and tasks, and `run_view` defines the view.

May import: learners, ledger, settings, storage, telemetry.
"""
