"""The links between the registrar and its fronts and learners, and how long each may be silent.

`link` measures one link. `links` keeps all links and assigns names to fronts.

May import: access, learners, telemetry.
"""
