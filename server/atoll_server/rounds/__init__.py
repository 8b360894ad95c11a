"""The syncer, a pure state machine that decides when rounds open and close, and which weights a merge uses.

It has no clock, IO or threads. `syncer_events` lists its inputs and outputs.

`syncer` opens and closes rounds, and `round_state` contains the state of a fragment's rounds.

May import: learners, settings.
"""
