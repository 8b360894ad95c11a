"""Backs up a run's directory while its core runs, and restores a backup into a new directory.

`backup_files` lists and checks a backup's files, and `backup_folder` has the folder that holds a run's backups.

May import: checkpoints, learners, ledger, storage.
"""
