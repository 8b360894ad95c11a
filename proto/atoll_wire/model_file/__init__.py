"""The file of a run's published model. Exports and readers write identical files.

Start with `model_file`. `fixed_values` describes the tensors that training does not change.
`export_summary` describes a written file to the user.

May import: errors, layout.
"""
