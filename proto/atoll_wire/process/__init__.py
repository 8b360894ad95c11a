"""What each Atoll process needs: settings and their command-line options, logs, the metrics and health server.

May import: errors, outer_pb2, security.
"""
