"""The dashboard's view of the run: the client of the core, the newest answers, rates and histories.

`run_feed` polls the core through `core_client`, and sums learners by region. `run_rates` computes rates and adds a
point to each chart's history after each poll. `history` defines such a series, and `history_file` stores them.

May import: models.
"""
