"""A plan for a job: settings, load of links, cost, memory, and a trial in virtual time.

May import: fleet.
"""
