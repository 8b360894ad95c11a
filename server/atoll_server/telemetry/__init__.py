"""Metrics for Prometheus, the timeline of recent rounds, and the list of recent changes.

May import: access, rounds, rpc.
"""
