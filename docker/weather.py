"""Cuts the link of a relay now and then, and mends it: python weather.py, in the relay's process namespace."""

import os
import random
import signal
import time

FAIR_S, FOUL_S = (30.0, 90.0), (10.0, 40.0)

while True:
    for seconds in (FAIR_S, FOUL_S):
        time.sleep(random.uniform(*seconds))  # noqa: S311
        os.kill(1, signal.SIGUSR1)
        print("the link is", "cut" if seconds is FAIR_S else "mended", flush=True)
