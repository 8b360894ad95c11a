"""Atoll in the real trainers. `make test-integrations` installs these libraries, in two versions of each."""
