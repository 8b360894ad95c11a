"""The file of a run's published model, which exports and readers write with the same bytes.

Start with `model_file`. `fixed_values` describes the tensors that training does not change.

May import: errors, layout.
"""
