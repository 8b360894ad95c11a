"""Tracks the links between the registrar and its fronts and learners, and computes how long each may be silent.

`link` measures one link. `links` manages all links and assigns names to fronts.

May import: access, learners, telemetry.
"""
