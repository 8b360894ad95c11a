"""What a run will do, before it is run: `atoll plan`, and `atoll simulate` with the paper's tables."""
