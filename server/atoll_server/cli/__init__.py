"""Subcommands of `atoll` that start a core, call a core, read a run's directory, or issue certificates.

May import: access, backups, checkpoints, ledger, links, merging, operators, processes, rounds, run, service, settings,
storage.
"""
