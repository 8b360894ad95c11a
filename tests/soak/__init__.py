"""The soak test: a small deployment that is disturbed for many minutes, and must not grow. See run.py."""
