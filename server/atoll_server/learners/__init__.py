"""The learners of a run: their names, sessions and time accounts, and the plausibility of their reports.

`learner_registry` decides which process may use a name, and `session_tokens` issues and checks session tokens.
`goodput` accounts for learner time, from the counters in `learner_counters`. `plausibility` limits how much of a
learner's reported work counts.

May import: access.
"""
