"""Measures the model's quality in virtual time, with real text, model, syncer, merge, codec and layout.

May import: nothing.
"""
