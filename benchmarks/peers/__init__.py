"""Measures other systems, each in its own environment and as its documentation says. Contains none of their code.

May import: data_plane, interface_bytes.
"""
