"""The models of the JSON API, and the conversion from the core's messages.

May import: nothing.
"""
