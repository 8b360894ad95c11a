"""Follows the published model of a run, without being a learner.

`follower` has the public class, and `pull` writes files. `follow_session` reads from cores and fronts on the thread of
`follow_thread`, which hands consistent cuts to the user's thread (`cuts`).

May import: errors, transfers.
"""
