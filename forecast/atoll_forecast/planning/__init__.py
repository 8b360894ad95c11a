"""A plan for a job: settings, what links must carry, money, memory, and a trial in virtual time.

May import: fleet.
"""
