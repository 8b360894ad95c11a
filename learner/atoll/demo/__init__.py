"""`atoll demo`: real processes on one machine, and a SIGKILL of each kind on the way."""
