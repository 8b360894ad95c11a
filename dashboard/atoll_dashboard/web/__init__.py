"""The HTTP server: routes that read, routes for operator actions, headers, the process.

May import: feed, models, settings.
"""
