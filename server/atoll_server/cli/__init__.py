"""Subcommands of `atoll` for a core: start it, query it, read its directory, issue certificates.

May import: access, checkpoints, merging, run, service, settings, storage.
"""
