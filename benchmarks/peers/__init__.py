"""Other systems, each used as its documentation says, in an environment of its own. None of their code is here.

May import: data_plane.
"""
