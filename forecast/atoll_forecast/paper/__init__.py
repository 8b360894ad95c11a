"""The tables of the paper (arXiv 2604.21428), compared with the results of simulations.

May import: fleet, planning.
"""
