"""The peers, each driven as its documentation says, in an environment of its own. No line of theirs is here.

May import: data_plane.
"""
