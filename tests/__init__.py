"""Tests of Atoll."""
