"""`atoll chaos`: kill, pause and restart the processes of a local deployment, and report what that cost.

May import: demo, reference.
"""
