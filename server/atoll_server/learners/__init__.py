"""The learners of a run: their names, sessions and time accounts, and the plausibility of their reports.

`learner_registry` decides which process may use a name, and `session_tokens` issues and checks session tokens.
`goodput` accounts for learner time, from the counters in `learner_counters`. `plausibility` compares the work that a
contribution declares with its learner's reports, and limits how much of it counts. `refused_joins` remembers processes
that could not join.

May import: access.
"""
