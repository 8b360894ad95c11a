"""Sources divide data into units without gaps, and recognise changed data."""

from __future__ import annotations

import inspect
import pickle
import re
import textwrap

import numpy as np
import pytest
from atoll.data import Rows, TokenFile, sources
from atoll.errors import LearnerError


@pytest.mark.parametrize(("rows", "unit"), [(10, 3), (9, 3), (1, 5)])
def test_units_of_rows_have_every_row_once(rows, unit):
    source = Rows(list(range(rows)), unit)
    found = [source.sample(each, n) for each in range(source.units) for n in range(source.samples(each))]
    assert found == list(range(rows))


@pytest.mark.parametrize("overlap", [0, 1])
def test_units_of_a_token_file_have_every_sample_once(tmp_path, overlap):
    tokens = np.arange(1000, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    source = TokenFile(tmp_path / "tokens.bin", 65, 4, overlap=overlap)
    found = [source.sample(each, n).tolist() for each in range(source.units) for n in range(source.samples(each))]
    starts = range(0, 1000 - 65 + 1, 65 - overlap)
    assert found == [list(range(start, start + 65)) for start in starts]
    assert source.unit_tokens == 260
    again = pickle.loads(pickle.dumps(source))  # noqa: S301 - its own bytes
    assert again.sample(1, 0).tolist() == found[4]


def test_another_file_has_another_fingerprint(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50_000, 200_000).astype(np.uint16)
    for name in ("one", "same", "other"):
        tokens.tofile(tmp_path / name)
    tokens[-1] ^= 1
    tokens.tofile(tmp_path / "other")
    one, same, other = (TokenFile(tmp_path / name, 128, 8).fingerprint for name in ("one", "same", "other"))
    assert one == same != other
    assert TokenFile(tmp_path / "one", 128, 9).fingerprint != one


def test_rows_are_compared_by_number_and_version():
    known = Rows([1, 2, 3], 2, version="v1").fingerprint
    assert Rows([4, 5, 6], 2, version="v1").fingerprint == known
    for other in (Rows([1, 2, 3], 2, version="v2"), Rows([1, 2], 2, version="v1"), Rows([1, 2, 3], 1, version="v1")):
        assert other.fingerprint != known


def test_wrong_arguments_are_refused_in_one_line(tmp_path):
    (tmp_path / "short").write_bytes(bytes(10))
    for make, words in (
        (lambda: Rows([], 1), "is empty or cannot be indexed"),
        (lambda: Rows(iter([1]), 1), "map-style dataset"),
        (lambda: Rows([1], 0), "unit=0"),
        (lambda: TokenFile(tmp_path / "missing", 4, 1), "cannot be read"),
        (lambda: TokenFile(tmp_path / "short", 6, 1), "has 5 tokens of type uint16, fewer than the 6"),
        (lambda: TokenFile(tmp_path / "short", 4, 1, overlap=4), "overlap"),
    ):
        with pytest.raises(LearnerError, match=words) as caught:
            make()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("thing", [sources.Rows, sources.Source])
def test_the_examples_are_correct(thing):
    (example,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(thing), re.DOTALL)
    names = vars(sources).copy()
    exec(textwrap.dedent(example), names)  # noqa: S102 - our own docstring
    if "Squares" in names:
        assert [names["Squares"]().sample(2, number).item() for number in (0, 7)] == [256, 529]
