"""Tests of the wire code."""
