"""The soak test: a small deployment is disturbed for many minutes, and its use of resources must not grow.

See run.py.
"""
