"""Subcommands of `atoll` for a core: start it, ask it, read its directory, issue certificates.

May import: access, checkpoints, merging, service, settings, storage.
"""
