"""The tables of the paper (arXiv 2604.21428) vs. the results of simulations.

May import: fleet, planning.
"""
