"""Tests of the `atoll` command."""
