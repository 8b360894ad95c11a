"""When rounds open and close, and what is merged with which weight: the syncer, a pure state machine.

No clock, no IO, no threads. `syncer_events` lists what goes in and what comes out.

`syncer` opens and closes rounds; `round_state` holds where a fragment's round stands.

May import: learners, settings.
"""
