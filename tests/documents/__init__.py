"""Tests of the documents: fences run, commands and options exist, quoted messages match the code."""
