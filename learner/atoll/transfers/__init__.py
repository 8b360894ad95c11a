"""Fetches that learners and followers share: remedies for errors, the retry loop, and interrupted fetches.

May import: errors, fragments.
"""
