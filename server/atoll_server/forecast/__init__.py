"""What a run will do, before it is run: a fleet in virtual time, goodput under failures, links, and a plan.

May import: cli, merging, rounds, run, settings.
"""
