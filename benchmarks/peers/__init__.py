"""Other systems, each used as documented, in its own environment. This package contains none of their code.

May import: data_plane.
"""
