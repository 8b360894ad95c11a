"""Parts of every gRPC server: channel limits, the end of waiting calls, open calls, rate limits, start and stop.

May import: access.
"""
