"""Tests of the documents: fences run, commands and options exist, and quoted messages match the code."""
