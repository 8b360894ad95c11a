"""LoRA with PEFT: only the adapters travel, and an export loads over the base model."""

from __future__ import annotations

import json

import pytest
import torch
from atoll_server.cli.export_target import export_target
from atoll_server.cli.operator_client import OperatorTarget, export_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from tests.end_to_end.world import core, eventually
from tests.integrations.test_transformers import trainer
from tests.integrations.world import gpt

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(400)]


def adapted(base_seed=0, seed=0):
    """Returns a base model with adapters on its attention."""
    import peft

    base = gpt(base_seed)
    torch.manual_seed(seed)
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def test_only_adapters_are_sent_and_an_export_becomes_an_adapter_folder(tmp_path, capsys):
    import peft

    with core(tmp_path) as running:
        for seed, name in ((1, "a"), (2, "b")):
            it, callback = trainer(running, tmp_path, steps=16, model=adapted(seed=seed), name=name)
            it.train()
            assert callback.learner.stats().abandoned_tokens == 0
        eventually(lambda: running.status().contributions.pending == 0)
        assert running.status().parameters == sum(p.numel() for p in adapted().parameters() if p.requires_grad)
        with safe_open(running.directory / "initial.safetensors", "pt") as file:
            assert all("lora_" in name for name in file.keys())  # noqa: SIM118 - safe_open is not iterable
        target = OperatorTarget(running.address)
        export_checkpoint(target, tmp_path / "now.safetensors", initial=False)
        assert "warning: the file lacks" in capsys.readouterr().out
        adapted().peft_config["default"].save_pretrained(tmp_path)
        export_checkpoint(target, tmp_path / "adapter", initial=False, adapter=tmp_path / "adapter_config.json")
        assert "warning" not in capsys.readouterr().out, "PEFT loads the folder over the base model"
    with safe_open(tmp_path / "now.safetensors", "pt") as file:
        lacking = json.loads(file.metadata()["atoll.frozen"])
    found = adapted()
    keys = found.load_state_dict(load_file(tmp_path / "now.safetensors"), strict=False)
    assert not keys.unexpected_keys
    assert set(keys.missing_keys) == set(lacking) | {n for n in keys.missing_keys if n.endswith("lm_head.weight")}
    found.save_pretrained(tmp_path / "by-peft")
    names = [load_file(tmp_path / folder / "adapter_model.safetensors").keys() for folder in ("adapter", "by-peft")]
    assert names[0] == names[1]
    loaded = peft.PeftModel.from_pretrained(gpt(), tmp_path / "adapter")
    ids = torch.arange(8)[None]
    assert torch.allclose(loaded.eval()(ids).logits, found.eval()(ids).logits)
    assert not torch.allclose(loaded(ids).logits, gpt().eval()(ids).logits), "the adapters must be trained"


def test_a_run_begins_from_a_file_with_adapters_only(tmp_path):
    given = {name: value for name, value in adapted(seed=3).state_dict().items() if "lora_" in name}
    save_file(given, tmp_path / "adapters.safetensors")
    with core(tmp_path, "--init", str(tmp_path / "adapters.safetensors")) as running:
        it, callback = trainer(running, tmp_path, steps=1, model=adapted(seed=1), learning_rate=0.0)
        it.train()
        for name, value in given.items():
            assert torch.equal(it.model.state_dict()[name], value)
        assert callback.learner.stats().steps == 1


def test_an_exported_classifier_has_the_modules_to_save_under_pefts_names(tmp_path):
    import peft
    from transformers import GPT2ForSequenceClassification

    def classifier(seed):
        torch.manual_seed(0)
        base = GPT2ForSequenceClassification(gpt().config)
        torch.manual_seed(seed)
        wanted = {"target_modules": ["c_attn", "wte"], "modules_to_save": ["score"], "fan_in_fan_out": True}
        return base, peft.get_peft_model(base, peft.LoraConfig(r=2, task_type="SEQ_CLS", **wanted))

    _, model = classifier(1)
    trained = {name: value.detach() + 1 for name, value in model.named_parameters() if value.requires_grad}
    model.peft_config["default"].save_pretrained(tmp_path)
    with export_target(tmp_path / "adapter", None, tmp_path / "adapter_config.json") as target:
        target.write(save(trained))
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(GPT2ForSequenceClassification(gpt().config), tmp_path / "adapter")
    found = dict(loaded.named_parameters())
    assert len(trained) >= 4
    assert all(torch.equal(found[name], value) for name, value in trained.items())
