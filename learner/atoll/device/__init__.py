"""Encodes and decodes on the device of the parameters, with torch operations on a separate stream.

Start with `device_coder`.

May import: fragments.
"""
