"""Benchmarks of failures: goodput, loss and restart times when learners and cores are killed, and data units.

May import: conditions, process_state.
"""
