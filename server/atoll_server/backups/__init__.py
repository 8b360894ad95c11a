"""Backs up a run's directory while its core runs, and restores a backup into a new directory.

`backup` takes a backup. `backup_files` copies the ledger, lists a backup's files and checks them. `backup_folder`
manages the folder that contains a run's backups. `restoring` restores a backup.

May import: checkpoints, learners, ledger, storage.
"""
