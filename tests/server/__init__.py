"""Tests of the core and the front."""
