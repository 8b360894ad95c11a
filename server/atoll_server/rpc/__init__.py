"""Parts of every gRPC server: channel limits, ends of waiting calls, open calls, rate limits, start and stop.

May import: access.
"""
