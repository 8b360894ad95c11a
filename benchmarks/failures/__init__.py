"""Benchmarks of failures: goodput, loss and restart times when learners and cores are killed.

May import: process_state.
"""
