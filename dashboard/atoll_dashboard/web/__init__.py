"""The HTTP server: routes for reading and for operator actions, runbooks, headers, and the process.

May import: feed, models, settings.
"""
