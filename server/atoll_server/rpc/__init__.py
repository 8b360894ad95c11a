"""What every gRPC server here shares: channel limits, waiting calls that end, open calls, rate limits, process start.

May import: access.
"""
