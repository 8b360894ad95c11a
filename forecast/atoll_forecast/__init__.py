"""Forecasts of a run: `atoll plan`, and `atoll simulate` for the tables of the paper."""
