"""The reference learner: deterministic parts, real text, and a model that learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from atoll.reference import data
from atoll.reference.model import SIZES, build
from atoll.reference.train import TrainSettings, learning_rate, train_alone, validation_loss


def test_the_same_seed_gives_the_same_model_whatever_was_drawn_before():
    first = build("tiny", 5).state_dict()
    torch.rand(17)
    second = build("tiny", 5).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], build("tiny", 6).state_dict()["head.weight"])


@pytest.mark.parametrize(("size", "millions"), [("tiny", 1.05), ("25m", 25.4), ("124m", 125)])
def test_sizes_are_what_they_are_called(size, millions):
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


def test_the_standard_library_is_text_that_is_the_same_every_time():
    first, second = data.load(None, 128), data.load(None, 128)
    assert first.sha256 == second.sha256
    assert len(first.training) > 5_000_000
    assert 0.02 < len(first.validation) / len(first.training) < 0.1


def test_a_single_file_is_cut_near_its_end(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)) * 100)
    corpus = data.load(tmp_path / "text", 16)
    assert (len(corpus.training), len(corpus.validation)) == (19_000, 1_000)


def test_islands_see_different_text_and_the_same_island_the_same():
    text = np.arange(10_000, dtype=np.uint16).astype(np.uint8)
    one, again, other = (next(data.batches(text, 4, 32, 0, name)) for name in ("a", "a", "b"))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("content", [b"", b"short"])
def test_too_little_text_is_one_line(tmp_path, content):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(data.DataError, match="give more text"):
        data.load(tmp_path / "text", 128)


def test_text_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(data.DataError, match="does not exist"):
        data.load(tmp_path / "nothing", 128)


def test_the_rate_warms_up_and_falls_to_a_tenth():
    assert learning_rate(1.0, 0.0, 100) < 0.05
    assert learning_rate(1.0, 0.05, 100) == pytest.approx(1.0)
    assert learning_rate(1.0, 1.0, 100) == pytest.approx(0.1)
    assert learning_rate(1.0, 7.0, 100) == pytest.approx(0.1)


def test_a_restarted_process_warms_its_optimizer_up_again():
    rates = [learning_rate(1.0, 0.5, steps) for steps in range(40)]
    assert rates[0] < 0.05 * rates[-1]
    assert rates == sorted(rates)


def test_training_alone_lowers_the_loss(tmp_path):
    (tmp_path / "text").write_bytes(b"to be or not to be, that is the question. " * 300)
    settings = TrainSettings(data=tmp_path / "text", batch=4)
    corpus = data.load(tmp_path / "text", 128)
    before = validation_loss(build("tiny", 0), corpus)
    model = train_alone(settings, "a", 12 * 4 * 128, lambda *_: None)
    assert validation_loss(model, corpus) < 0.8 * before
