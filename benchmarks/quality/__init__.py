"""Measures the model's quality: real text and model, the real syncer, merge, codec and layout, in virtual time.

May import: nothing.
"""
