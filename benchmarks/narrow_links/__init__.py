"""Compares Atoll with data-parallel training in four regions over real TCP on narrow links.

The ratio of link rate to step length is the paper's.

May import: conditions, data_parallel, links.
"""
