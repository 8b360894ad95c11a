"""Tests that need a GPU: `make test-gpu`. The other tests of `tests.devices` use a GPU too if there is one."""
