"""The soak test disturbs a small deployment for many minutes. Its use of resources must not grow.

See run.py.
"""
