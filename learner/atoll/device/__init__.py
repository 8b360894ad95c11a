"""Coding on the device of the parameters: kernels of torch operations, and the stream and memory that they use.

Start with `device_coder`.

May import: fragments.
"""
