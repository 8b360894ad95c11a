"""The ranks of one learner: which parameters each holds, which frames each owns, and how values move between them.

`tensor_part` and `division` are pure. `placements` reads DTensors. `rank_group` makes collective calls.

May import: errors, fragments.
"""
