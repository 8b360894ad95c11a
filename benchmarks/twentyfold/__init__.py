"""Four regions over real TCP on narrow links: Atoll beside data-parallel, at the paper's ratio of link to step.

May import: data_parallel, links.
"""
