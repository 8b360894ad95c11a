"""Parts of every gRPC server: channel options, interruptible waits, open calls, rate limits, start and shutdown.

May import: access.
"""
