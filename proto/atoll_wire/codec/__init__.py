"""Coding of float32 values as frames: quantisation, kernels over blocks and frames, compression, checksums, buffers.

Start with `frame_codec`, which encodes and decodes one frame. `quantising` encodes a block as int4 or int8.
`block_kernels` adds coded blocks to values, and `frame_kernels` does so for the blocks of a frame.

May import: layout.
"""
