"""The ranks of one learner: which parameters a rank holds, which frames it owns, and how ranks exchange values.

`tensor_part` and `division` are pure functions. `placements` reads DTensors. `rank_group` makes collective calls.

May import: errors, fragments.
"""
