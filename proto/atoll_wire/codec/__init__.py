"""Coding of float32 values as frames: quantisation, kernels over blocks and frames, compression, checksums, buffers.

Start with `frame_codec`, which encodes and decodes one frame.

May import: layout.
"""
