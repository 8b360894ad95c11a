"""The syncer, a pure state machine that decides when rounds open and close and which contributions they merge.

The syncer reads no clock, performs no IO and starts no threads. `syncer_events` lists the syncer's inputs and outputs.

`syncer` opens and closes rounds. `round_state` contains one fragment's rounds, and applies staleness to the weights of
a merge. `liveness` decides which learners rounds wait for. `outer_rule` computes a merge's learning rate and momentum.

May import: learners, settings.
"""
