"""`atoll demo`: real processes on one machine, with a SIGKILL of each kind on the way.

May import: reference.
"""
