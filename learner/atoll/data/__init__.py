"""Datasets whose units the core leases, so that the learners of a run train on each unit once per epoch.

`Rows` and `TokenFile` divide data into units. `Learner.units` returns `Units`, which hands out the samples of leased
units. `unit_log` records which step finished each unit, and `leased_units` asks the core for more.

May import: errors.
"""

from __future__ import annotations

from atoll.data.sources import Rows, Source, TokenFile
from atoll.data.units import UnitLoader, Units

__all__ = ["Rows", "Source", "TokenFile", "UnitLoader", "Units"]
