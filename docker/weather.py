"""Cuts and restores the link of a relay at random. Run `python weather.py` in the relay's process namespace."""

import os
import random
import signal
import time

FAIR_S, FOUL_S = (30.0, 90.0), (10.0, 40.0)

RELAY = 1  # process ID


def restore(*_: object) -> None:
    """Restores the link before the process ends."""
    os.kill(RELAY, signal.SIGUSR2)
    raise SystemExit


signal.signal(signal.SIGTERM, restore)
while True:
    time.sleep(random.uniform(*FAIR_S))  # noqa: S311
    os.kill(RELAY, signal.SIGUSR1)
    print("the link is cut", flush=True)
    time.sleep(random.uniform(*FOUL_S))  # noqa: S311
    os.kill(RELAY, signal.SIGUSR2)
    print("the link is restored", flush=True)
