"""When rounds open and close, and what is merged with which weight: the syncer, a pure state machine.

No clock, no IO, no threads. `events` lists what goes in and what comes out.

May import: learners, settings.
"""
