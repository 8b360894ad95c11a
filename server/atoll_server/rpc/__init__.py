"""Parts that all gRPC servers share: channel options, interruptible waits, open calls, rate limits, start and shutdown.

`limiter` limits the calls, messages and bytes of each caller.

May import: access.
"""
