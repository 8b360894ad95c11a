"""An export as an adapter's folder has PEFT's names, and refuses what is not an adapter."""

from __future__ import annotations

import json

import numpy as np
import pytest
from atoll_server.cli.export_target import ExportError, check_options, export_target
from atoll_wire.errors import UsageError
from safetensors.numpy import load_file, save

NAMES = {  # in a model -> in PEFT's file
    "base_model.model.h.0.c_attn.lora_A.default.weight": "base_model.model.h.0.c_attn.lora_A.weight",
    "base_model.model.wte.lora_embedding_A.default": "base_model.model.wte.lora_embedding_A",
    "base_model.model.score.modules_to_save.default.weight": "base_model.model.score.weight",
    "base_model.model.default_norm.base_layer.weight": "base_model.model.default_norm.base_layer.weight",
}
MODEL = {name: np.full((number, 2), number, np.float32) for number, name in enumerate(NAMES, start=1)}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    return path


def written(out, config, content, piece=7):
    with export_target(out, None, config) as target:
        for start in range(0, len(content), piece):
            target.write(content[start : start + piece])


def test_the_folder_has_the_configuration_and_the_values_under_pefts_names(tmp_path, config):
    for piece in (1, 7, 1 << 20):
        written(tmp_path / "adapter", config, save(MODEL, {"format": "pt"}), piece)
        assert {each.name for each in (tmp_path / "adapter").iterdir()} == {"adapter_model.safetensors", config.name}
        assert (tmp_path / "adapter" / config.name).read_bytes() == config.read_bytes()
        found = load_file(tmp_path / "adapter/adapter_model.safetensors")
        assert found.keys() == set(NAMES.values())
        assert all(np.array_equal(found[NAMES[name]], value) for name, value in MODEL.items())


def test_a_failed_export_leaves_the_earlier_one(tmp_path, config):
    content = save(MODEL)
    written(tmp_path / "adapter", config, content)
    before = {each.name: each.read_bytes() for each in (tmp_path / "adapter").iterdir()}
    with pytest.raises(ExportError, match="ended too early"):
        written(tmp_path / "adapter", config, content[:20])
    with pytest.raises(ExportError, match="the export is invalid"):
        written(tmp_path / "adapter", config, b"\xff" * 16)
    with pytest.raises(ExportError, match="no adapter named default"):
        written(tmp_path / "adapter", config, save({"weight": np.zeros(2, np.float32)}))
    assert {each.name: each.read_bytes() for each in (tmp_path / "adapter").iterdir()} == before


def test_the_adapters_appear_after_their_configuration(tmp_path, config):
    (tmp_path / "adapter" / config.name).mkdir(parents=True)
    with pytest.raises(ExportError, match="cannot be written"):
        written(tmp_path / "adapter", config, save(MODEL))
    assert [each.name for each in (tmp_path / "adapter").iterdir()] == [config.name]


def test_other_files_and_options_are_refused_in_one_line(tmp_path, config):
    with pytest.raises(ExportError, match="cannot be read"):
        written(tmp_path / "adapter", tmp_path / "missing", save(MODEL))
    for content in ("[]", "{}", "no JSON"):
        config.write_text(content)
        with pytest.raises(ExportError, match="has no peft_type"):
            written(tmp_path / "adapter", config, save(MODEL))
    with pytest.raises(UsageError, match="omit one of them"):
        check_options(1 << 20, config)
    assert not (tmp_path / "adapter").exists()
