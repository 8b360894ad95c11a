"""The reference learner: its parts are deterministic, its text is real, and its model learns."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
from atoll.reference import data
from atoll.reference.model import SIZES, build
from atoll.reference.settings import JoinSettings, TrainSettings
from atoll.reference.train import (
    WARM_UP,
    DeviceError,
    learning_rate,
    train,
    train_alone,
    usable_device,
    validation_loss,
)  # fmt: skip

from tests.learner.fake_core import fake_core


def test_the_same_seed_gives_the_same_model_after_other_random_draws():
    first = build("tiny", 5).state_dict()
    torch.rand(17)
    second = build("tiny", 5).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], build("tiny", 6).state_dict()["head.weight"])


@pytest.mark.parametrize(("size", "millions"), [("tiny", 1.05), ("25m", 25.4), ("124m", 125)])
def test_models_have_the_sizes_of_their_names(size, millions):
    with torch.device("meta"):
        from atoll.reference.model import Transformer

        model = Transformer(SIZES[size])
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_a_model_sees_only_the_past():
    model = build("tiny", 0)
    text = torch.randint(0, 256, (1, 64))
    changed = text.clone()
    changed[0, 40:] = 0
    with torch.no_grad():
        assert torch.allclose(model(text)[0, :40], model(changed)[0, :40], atol=1e-5)


def test_the_text_of_the_standard_library_is_always_the_same():
    first, second = data.load(None, 128), data.load(None, 128)
    assert first.sha256 == second.sha256
    assert len(first.training) > 5_000_000
    assert 0.02 < len(first.validation) / len(first.training) < 0.1


def test_a_single_file_is_cut_near_its_end(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)) * 100)
    corpus = data.load(tmp_path / "text", 16)
    assert (len(corpus.training), len(corpus.validation)) == (19_000, 1_000)


def test_a_folder_of_few_files_is_cut_near_its_end(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt"):  # a division by names would make all of them training text
        (tmp_path / name).write_bytes(name.encode() * 1_000)
    corpus = data.load(tmp_path, 16)
    assert (len(corpus.training), len(corpus.validation)) == (14_252, 750)
    assert set(bytes(corpus.validation).split(b"c.txt")) == {b""}


def test_a_folder_of_many_files_holds_out_whole_files(tmp_path):
    for number in range(190):  # a cut near the end would divide a file
        (tmp_path / f"{number}.txt").write_bytes(b"%03d " % number * 50)
    corpus = data.load(tmp_path, 16)
    trained, held_out = (set(bytes(part).split()) for part in (corpus.training, corpus.validation))
    assert held_out
    assert not trained & held_out


def test_only_used_text_is_read(tmp_path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file of a terabyte, larger than memory
    corpus = data.load(tmp_path / "huge", 16)
    assert len(corpus.training) + len(corpus.validation) == data.MAX_BYTES


def test_each_island_sees_its_own_text_which_is_repeatable():
    text = np.arange(10_000, dtype=np.uint16).astype(np.uint8)
    one, again, other = (next(data.batches(text, 4, 32, 0, name)) for name in ("a", "a", "b"))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_stream_continues_at_any_batch():
    text = np.arange(10_000, dtype=np.uint16).astype(np.uint8)
    whole = list(islice(data.batches(text, 4, 32, 0, "a"), 6))
    rest = list(islice(data.batches(text, 4, 32, 0, "a", first=4), 2))
    assert all(torch.equal(one, other) for one, other in zip(whole[4:], rest, strict=True))
    assert not torch.equal(whole[0], whole[4])


@pytest.mark.parametrize("content", [b"", b"short"])
def test_too_little_text_gives_a_one_line_error(tmp_path, content):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(data.DataError, match="give more text"):
        data.load(tmp_path / "text", 128)


def test_missing_text_gives_a_one_line_error(tmp_path):
    with pytest.raises(data.DataError, match="does not exist"):
        data.load(tmp_path / "nothing", 128)


def test_unreadable_text_gives_a_one_line_error(tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(b"text" * 1_000)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    for path in (tmp_path, tmp_path / "text"):
        with pytest.raises(data.DataError, match=r"cannot be read \(Permission denied\)"):
            data.load(path, 128)


def test_an_unreadable_subfolder_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(b"text" * 1_000)
    (tmp_path / "closed").mkdir()
    scandir = data.os.scandir

    def denied(place: str) -> object:
        if str(place).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return scandir(place)

    monkeypatch.setattr(data.os, "scandir", denied)
    with pytest.raises(data.DataError, match="cannot be read"):
        data.load(tmp_path, 128)


@pytest.mark.parametrize("device", ["nonsense", "meta", "cuda:99", ""])
def test_a_missing_device_gives_a_one_line_error(device):
    with pytest.raises(DeviceError, match=f"--device {device} cannot be used .*give auto, cpu or cuda$"):
        usable_device(device)


def test_an_error_of_several_lines_gives_one_line(monkeypatch):
    def failing(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: invalid device ordinal\nGPU device may be out of range")

    monkeypatch.setattr(torch, "zeros", failing)
    with pytest.raises(DeviceError) as error:
        usable_device("cpu")
    fact = "CUDA error: invalid device ordinal"
    assert str(error.value) == f"--device cpu cannot be used ({fact}): give auto, cpu or cuda"


def test_the_model_compiles_as_one_graph():
    model = build("tiny", 0)
    window = torch.randint(0, 256, (2, 33))
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(window), model.loss(window), atol=1e-6)


def test_the_rate_warms_up_and_falls_to_a_tenth():
    assert learning_rate(1.0, 0.0, 100) < 0.05
    assert learning_rate(1.0, 0.05, 100) == pytest.approx(1.0)
    assert learning_rate(1.0, 1.0, 100) == pytest.approx(0.1)
    assert learning_rate(1.0, 7.0, 100) == pytest.approx(0.1)


def test_a_restarted_process_warms_its_optimizer_up_again():
    rates = [learning_rate(1.0, 0.5, steps) for steps in range(40)]
    assert rates[0] < 0.05 * rates[-1]
    assert rates == sorted(rates)


def test_the_core_decides_where_training_ends(tmp_path):
    """With another end, the outer steps would cool down too late or too early."""
    (tmp_path / "text").write_bytes(b"to be or not to be, that is the question. " * 300)
    settings = TrainSettings(data=tmp_path / "text", batch=1, device="cpu")
    with fake_core() as core:
        core.total_tokens = 5 * 128
        train(settings, JoinSettings(servers=(core.address,), name="a", drain_s=0.0))
        assert core.left == ["a"]
        assert core.progress[-1].tokens == 5 * 128


def test_without_an_end_training_continues_at_the_peak_rate(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("atoll.reference.train.learning_rate", lambda peak, done, _: seen.append(done) or peak)
    (tmp_path / "text").write_bytes(b"to be or not to be, that is the question. " * 300)
    settings = TrainSettings(data=tmp_path / "text", batch=1, device="cpu", max_steps=3)
    with fake_core() as core, structlog.testing.capture_logs() as told:
        core.run_tokens = 10**9
        train(settings, JoinSettings(servers=(core.address,), name="a", drain_s=0.0))
        assert core.progress[-1].steps == 3
    assert seen == [WARM_UP] * 3
    assert learning_rate(1.0, WARM_UP, 100) == 1.0
    assert any("has no --total-tokens" in each["event"] for each in told)


def test_training_alone_lowers_the_loss(tmp_path):
    (tmp_path / "text").write_bytes(b"to be or not to be, that is the question. " * 300)
    settings = TrainSettings(data=tmp_path / "text", batch=4)
    corpus = data.load(tmp_path / "text", 128)
    before = validation_loss(build("tiny", 0), corpus)
    model = train_alone(settings, "a", 12 * 4 * 128, lambda *_: None)
    assert validation_loss(model, corpus) < 0.8 * before
