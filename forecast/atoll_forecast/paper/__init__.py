"""The tables of the paper (arXiv 2604.21428) beside what the simulations here give.

May import: fleet, planning.
"""
