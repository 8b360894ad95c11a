"""Atoll vs. data-parallel in four regions over real TCP on narrow links, with the paper's ratio of link to step.

May import: data_parallel, links.
"""
