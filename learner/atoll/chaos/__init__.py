"""`atoll chaos`: kills, pauses and restarts the processes of a local deployment and reports the lost work.

May import: demo, reference.
"""
