"""Fuzzing of all code that decodes data from a network."""
