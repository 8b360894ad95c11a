"""Wrong arguments, unusual state and damaged files give one line that names them and the fix."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
from atoll import Learner, LearnerError, RandomState
from atoll.checkpoints.directory import FACTS

from tests.learner.saving import Saving, events
from tests.learner.watched import mlp

# ------------------------------------------------------------------------------ arguments


def learner(**options: object) -> Learner:
    model = mlp()
    return Learner(model, torch.optim.SGD(model.parameters(), 0.1), "127.0.0.1:1", "a", **options)


@pytest.mark.parametrize("value", ["", 5, b"here", ["here"], True, "a\0b"], ids=repr)
def test_an_invalid_directory_argument_is_refused(value):
    with pytest.raises(LearnerError) as caught:
        learner(checkpoint_dir=value)
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"checkpoint_dir={value!r} is ")
    assert line.endswith(": pass a directory, or None to save no checkpoints")


@pytest.mark.parametrize("value", ["x", "5", True, 0, -1.5, float("nan"), float("inf"), [1], 1j], ids=repr)
def test_an_invalid_interval_is_refused(value, tmp_path):
    with pytest.raises(LearnerError) as caught:
        learner(checkpoint_dir=tmp_path, checkpoint_every_s=value)
    assert str(caught.value) == (
        f"checkpoint_every_s={value!r} is not a positive number of seconds: pass one, or None to save only on request"
    )


@pytest.mark.parametrize("value", [1, 0.5, np.float32(2), None], ids=repr)
def test_any_positive_number_is_an_interval(value, tmp_path):
    learner(checkpoint_dir=tmp_path, checkpoint_every_s=value)


def test_extra_state_must_be_a_dict_of_objects_with_state(tmp_path):
    optimizer = torch.optim.SGD(mlp().parameters(), 0.1)
    with pytest.raises(LearnerError, match=r'extra_state\["step"\] is of type int, which lacks state_dict'):
        learner(checkpoint_dir=tmp_path, extra_state={"step": 3})
    with pytest.raises(LearnerError, match=r"the key 5 of extra_state is of type int: use strings as keys"):
        learner(checkpoint_dir=tmp_path, extra_state={5: optimizer})
    for value, kind in ((5, "int"), ([optimizer], "list"), ("x", "str")):
        with pytest.raises(LearnerError, match=f"extra_state is of type {kind}: pass a dict"):
            learner(checkpoint_dir=tmp_path, extra_state=value)
    with pytest.raises(LearnerError, match="pass checkpoint_dir= too"):
        learner(extra_state={"optimizer": optimizer})
    with pytest.raises(LearnerError, match="saves no checkpoints: pass checkpoint_dir="):
        learner().save_checkpoint()


# ------------------------------------------------------------------------------ odd state


class Stateful:
    """An object with the given state."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


def endless() -> dict[str, object]:
    found: dict[str, object] = {}
    found["again"] = found
    return found


REFUSED = ", which torch.load refuses with weights_only=True"
ODD = {
    "class": ({"path": Path}, '["path"] is of type type' + REFUSED),
    "object": ({"path": Path("x")}, '["path"] is of type pathlib.PosixPath' + REFUSED),
    "array": ({"a": [1, {"b": np.zeros(2)}]}, '["a"][1]["b"] is of type numpy.ndarray' + REFUSED),
    "scalar": ({"a": (1, {2: np.float64(1)})}, '["a"][1][2] is of type numpy.float64' + REFUSED),
    "key": ({"a": {Path("x"): 1}}, '["a"] has a key of type pathlib.PosixPath' + REFUSED),
    "dict": ({"a": defaultdict(list)}, '["a"] is of type collections.defaultdict' + REFUSED),
    "whole": (Path("x"), " is of type pathlib.PosixPath" + REFUSED),
    "generator": ({"a": [(each for each in ())]}, '["a"][0] is of type generator, which cannot be copied'),
    "endless": (endless(), " contains itself, or is nested too deeply"),
    "meta": ({"a": torch.empty(2, device="meta")}, '["a"] is a tensor on the meta device, which has no values'),
}


@pytest.mark.parametrize(("state", "found"), ODD.values(), ids=ODD)
def test_state_that_cannot_be_saved_is_named_with_its_type(core, tmp_path, said, state, found):
    with Saving(core, tmp_path, extra_state={"odd": Stateful(state)}) as it:
        it.learner.save_checkpoint()
        it.turn()
        it.settle(1)
        assert it.learner.stats().checkpoints_failed == 1
        assert not it.folders()
    [line] = events(said, "could not save")
    assert line["error"].startswith(f'extra_state["odd"].state_dict(){found}'), line["error"]
    assert "return tensors and plain values" in line["error"]


def test_optimizer_state_that_cannot_be_saved_is_named(core, tmp_path, said):
    with Saving(core, tmp_path) as it:
        it.optimizer.param_groups[0]["where"] = Path("x")
        it.learner.save_checkpoint()
        it.turn()
        it.settle(1)
    [line] = events(said, "could not save")
    expected = 'optimizer 0: state_dict()["param_groups"][0]["where"] is of type pathlib.PosixPath'
    assert line["error"].startswith(expected), line["error"]


# ------------------------------------------------------------------------------ damaged files


def later(text: str) -> str:
    return json.dumps({"format": 2, "everything": "else"})


def wrong_type(text: str) -> str:
    return json.dumps(json.loads(text) | {"steps": "many"})


DAMAGED = "atoll.json is damaged: delete the folder if you do not need it, and check the disk"
FACTS_TEXTS = {
    "empty": (lambda _: "", DAMAGED),
    "no facts": (lambda _: "{}", DAMAGED),
    "torn": (lambda text: text[: len(text) // 2], DAMAGED),
    "deep": (lambda _: "[" * 100_000, DAMAGED),
    "wrong type": (wrong_type, DAMAGED),
    "no text": (lambda _: "\ud800", DAMAGED),
    "later": (later, "it has format 2, but this version of Atoll reads 1: use the version that wrote it"),
}


@pytest.mark.parametrize(("change", "reason"), FACTS_TEXTS.values(), ids=FACTS_TEXTS)
def test_damaged_facts_give_one_line_and_the_older_checkpoint_is_used(core, tmp_path, said, change, reason):
    with Saving(core, tmp_path) as it:
        it.save()
        folder = it.save()
    text = change((folder / FACTS).read_text()).encode(errors="surrogatepass")
    (folder / FACTS).write_bytes(text)
    with Saving(core, tmp_path) as again:
        assert int(next(iter(again.optimizer.state.values()))["step"]) == 1
        again.save()
    assert (folder / FACTS).read_bytes() == text, "the damaged file must stay"
    [line] = events(said, "ignoring a checkpoint")
    assert line["reason"] == reason
    assert line["folder"] == str(folder)


# ------------------------------------------------------------------------------ another name


def test_a_renamed_learner_takes_over_a_folder_and_logs_it(core, tmp_path, said):
    with Saving(core, tmp_path) as it:
        it.save()
        it.save()
    (tmp_path / "a").rename(tmp_path / "b")
    with Saving(core, tmp_path, name="b") as again:
        assert int(next(iter(again.optimizer.state.values()))["step"]) == 2
        assert json.loads((again.save() / FACTS).read_text())["learner"] == "b"
        assert len(again.folders()) == 2
    [line] = events(said, "restored a checkpoint")
    assert line["event"] == "restored a checkpoint of another learner: the optimizer continues from its saved state"
    assert line["log_level"] == "warning"
    assert (line["learner"], line["saved_by"]) == ("b", "a")


def test_a_learner_that_keeps_its_name_gets_no_warning(core, tmp_path, said):
    with Saving(core, tmp_path) as it:
        it.save()
    with Saving(core, tmp_path):
        pass
    [line] = events(said, "restored a checkpoint")
    assert line["log_level"] == "info"
    assert "saved_by" not in line


@pytest.mark.parametrize(("saved", "logged"), [(2, 1), (0, 0)], ids=["other GPUs", "no GPU"])
def test_generators_of_other_gpus_are_not_restored_without_a_word(saved, logged, monkeypatch):
    state = RandomState().state_dict() | {"cuda": [torch.get_rng_state()] * saved}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with structlog.testing.capture_logs() as said:
        RandomState().load_state_dict(state)
    assert len(said) == logged
    assert all("the GPUs' random generators are not restored" in line["event"] for line in said)
