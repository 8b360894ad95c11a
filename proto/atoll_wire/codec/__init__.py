"""Float32 values as coded frames: quantising, the kernels over blocks and frames, compression, checksums, buffers.

Start with `frame_codec`, which encodes and decodes one frame.

May import: layout.
"""
