"""Measures the model's quality in virtual time, with the real text, model, syncer, merge, codec and layout.

May import: nothing.
"""
