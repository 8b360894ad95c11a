"""Cuts the link of a relay now and then, and mends it: python weather.py, in the relay's process namespace."""

import os
import random
import signal
import time

FAIR_S, FOUL_S = (30.0, 90.0), (10.0, 40.0)

RELAY = 1  # its process


def restore(*_: object) -> None:
    """Before it ends: who stops the weather wants it to be fair."""
    os.kill(RELAY, signal.SIGUSR2)
    raise SystemExit


signal.signal(signal.SIGTERM, restore)
while True:
    time.sleep(random.uniform(*FAIR_S))  # noqa: S311
    os.kill(RELAY, signal.SIGUSR1)
    print("the link is cut", flush=True)
    time.sleep(random.uniform(*FOUL_S))  # noqa: S311
    os.kill(RELAY, signal.SIGUSR2)
    print("the link is mended", flush=True)
