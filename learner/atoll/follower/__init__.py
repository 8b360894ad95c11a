"""Follows the published model of a run, as a reader.

`follower` contains the public class, and `pull` writes files. `follow_thread` runs the thread on which `follow_session`
reads from cores and fronts. `cuts` passes consistent cuts from this thread to the user's thread.

May import: dtensors, errors, transfers.
"""
