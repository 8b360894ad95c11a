"""Benchmarks of failures: goodput, loss and restart times when learners and cores are killed, and data units.

May import: process_state, provenance.
"""
