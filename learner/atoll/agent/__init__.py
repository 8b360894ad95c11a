"""The agent: a thread beside training that joins the run, sends contributions, and fetches published updates.

May import: errors, fragments, stats.
"""
