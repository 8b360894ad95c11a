"""Shared by every gRPC server: channel limits, ending of waiting calls, open calls, rate limits, start and stop.

May import: access.
"""
