"""Forecasts of a run: `atoll plan`, and `atoll simulate` with the paper's tables."""
