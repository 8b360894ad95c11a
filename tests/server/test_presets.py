"""Presets of a run: their values, and options that override them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from atoll_server.processes.core import Core
from atoll_server.service.server import _core
from atoll_server.settings import FINETUNE, PRESETS, CoreSettings, RunSettings, ShardNumber
from atoll_wire.errors import SettingsError
from atoll_wire.process.settings import Given, command


def settings_of(**given: Any) -> RunSettings:
    """Returns the run settings of a new run with these options."""
    return RunSettings().changed(**started(**given))


def started(**given: Any) -> dict[str, Any]:
    """Returns the run settings that a start with these options sets."""
    taken: list[Any] = []
    function = command(lambda *all_: taken.extend(all_), CoreSettings, Given(RunSettings))
    everything = dict.fromkeys(function.__signature__.parameters)  # type: ignore[attr-defined]
    function(**everything | {"dir": "x"} | given)
    core, run = taken
    return core.run_settings(run)


def test_pretrain_has_the_defaults_and_finetune_has_a_small_interval():
    assert settings_of(preset="pretrain") == settings_of() == RunSettings()
    assert settings_of(preset="finetune") == RunSettings(inner_steps=12)


def test_an_option_overrides_the_preset():
    assert settings_of(preset="finetune", inner_steps="8", outer_lr="0.7") == RunSettings(inner_steps=8, outer_lr=0.7)
    assert settings_of(preset="finetune", inner_steps=str(RunSettings().inner_steps)) == RunSettings()


def test_presets_set_the_same_settings():
    """Otherwise, a start with another preset would keep some values of the first one."""
    assert {name: values.keys() for name, values in PRESETS.items()} == dict.fromkeys(PRESETS, FINETUNE.keys())


def test_another_preset_is_refused():
    with pytest.raises(SettingsError, match="--preset lora: input should be 'pretrain' or 'finetune'; see atoll core"):
        started(preset="lora")


def test_a_restart_changes_only_what_its_preset_and_its_options_name(tmp_path):
    def stored_after(preset: str | None, **given: Any) -> RunSettings:
        async def start() -> RunSettings:
            core = Core(CoreSettings.of(listen=("127.0.0.1:0",), directory=tmp_path, preset=preset), given)
            await core.start()
            await core.stop()
            return core.run.settings

        return asyncio.run(start())

    assert stored_after("finetune", outer_lr=0.7) == RunSettings(outer_lr=0.7, **FINETUNE)
    assert stored_after(None) == RunSettings(outer_lr=0.7, **FINETUNE)
    assert stored_after(None, inner_steps=8) == RunSettings(outer_lr=0.7, inner_steps=8)
    assert stored_after("pretrain") == RunSettings(outer_lr=0.7)


def test_a_shard_that_is_not_the_registrar_takes_no_preset():
    settings = CoreSettings(
        directory=Path("x"), preset="finetune", shard=ShardNumber(number=1, count=2), registrar="127.0.0.1:1"
    )
    with pytest.raises(
        SettingsError, match=r"^--preset belongs to the run: give it to the registrar, not to shard 1/2"
    ):
        _core(settings, {})
