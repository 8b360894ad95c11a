"""Parts of every gRPC server: channel limits, interruptible waits, open calls, rate limits, start and stop.

May import: access.
"""
