"""A plan for a job: settings, link load, cost, memory, and a trial in virtual time.

May import: fleet.
"""
