"""Tests that need a GPU: `make test-gpu`. Tests that use `tests.devices.DEVICES` also run on a GPU if there is one."""
