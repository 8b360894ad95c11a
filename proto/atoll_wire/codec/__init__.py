"""Float32 values as coded frames: quantising, the kernels over blocks and frames, compression, checksums, buffers.

Start with `frame_codec`, which codes and decodes one frame.

May import: layout.
"""
