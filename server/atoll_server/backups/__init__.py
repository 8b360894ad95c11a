"""Backs up a run's directory while its core runs, and restores a backup into a new directory.

`backup` takes a backup. `backup_files` copies the ledger and lists and checks a backup's files. `backup_folder` has
the folder that holds a run's backups. `restoring` restores a backup.

May import: checkpoints, learners, ledger, storage.
"""
