"""A synchronous data-parallel job (DistributedDataParallel, gloo) under failures: the baseline of `make chaos`.

May import: nothing.
"""
