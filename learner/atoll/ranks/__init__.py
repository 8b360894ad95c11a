"""The ranks of one learner: the parameters that each rank holds, the frames that it owns, and the exchange of values.

`tensor_part` and `division` are pure functions. `placements` reads DTensors. `rank_group` makes collective calls.
`messages` connects the ranks' agents. `entering` joins all ranks to the run together.

May import: dtensors, errors, fragments.
"""
