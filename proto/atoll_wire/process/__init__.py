"""Parts of every Atoll process: settings and their command-line options, logs, durable folders, file locks, and the
metrics and health server.

May import: cli, errors, outer_pb2, security.
"""
