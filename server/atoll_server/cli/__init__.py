"""Subcommands of `atoll` for a core: start and query it, read its directory, issue certificates.

May import: access, checkpoints, merging, run, service, settings, storage.
"""
