"""`--init` stages a file or a folder as one file with the same bytes. An invalid folder gives a one-line error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from atoll_server.checkpoints import parameter_source
from atoll_server.checkpoints.parameter_source import open_source
from atoll_server.checkpoints.tensor_file import open_tensors
from atoll_server.cli.export_target import export_target
from atoll_server.run.initial_parameters import STAGING, stage_source
from atoll_wire.layout.tensor_header import TensorFileError
from safetensors.torch import load_file, save_file

from tests.fuzz.decoders import SPECS

INDEX = "model.safetensors.index.json"
FILES = {
    "model-00001-of-00002.safetensors": {"embedding": torch.randn(40, 16), "a buffer": torch.arange(5)},
    "model-00002-of-00002.safetensors": {
        "large": torch.randn(60, 50).to(torch.bfloat16),
        "norm": torch.randn(33).to(torch.float16),
        "empty": torch.empty(0, 2),
    },
}
FIRST, SECOND = FILES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder as written by save_pretrained, in which a tied tensor has only one name."""
    made = tmp_path / "model"
    made.mkdir()
    for name, tensors in FILES.items():
        save_file(tensors, made / name, {"format": "pt"})
    write_index(made, {tensor: name for name, tensors in FILES.items() for tensor in tensors})
    (made / "config.json").write_text("{}")
    (tmp_path / "run" / STAGING).mkdir(parents=True)
    return made


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def staged(path: Path, directory: Path) -> dict[str, torch.Tensor]:
    """Stages a source for the run in `directory`. Returns the tensors of the staged file."""
    staging = stage_source(open_source(path), directory)
    try:
        staging.check(SPECS)
        staging.publish(directory)
    finally:
        staging.close()
    assert list((directory / STAGING).iterdir()) == []
    return load_file(directory / "initial.safetensors")


def test_a_folder_is_staged_as_one_file(tmp_path, folder):
    found = staged(folder, tmp_path / "run")
    wanted = {name: tensor for tensors in FILES.values() for name, tensor in tensors.items()}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor), name
    assert open_tensors(tmp_path / "run" / "initial.safetensors").metadata == {"format": "pt"}


def test_links_to_files_elsewhere_are_followed(tmp_path, folder):
    """Hugging Face's cache has such folders."""
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        path.symlink_to(tmp_path / "blobs" / str(number))
    assert len(staged(folder, tmp_path / "run")) == 5


def test_a_file_and_a_folder_with_one_file_are_copied_byte_for_byte(tmp_path, folder):
    (tmp_path / "small").mkdir()
    path = tmp_path / "small" / "model.safetensors"
    save_file(load_whole(folder), path, {"note": "hello"})
    for source in (path, path.parent):
        staged(source, tmp_path / "run")
        assert (tmp_path / "run" / "initial.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("limit", [1, 3000, 1 << 20])
def test_a_split_file_is_joined_to_the_same_bytes(tmp_path, folder, limit):
    staged(folder, tmp_path / "run")
    whole = (tmp_path / "run" / "initial.safetensors").read_bytes()
    with export_target(tmp_path / "split", limit) as target:
        target.write(whole)
    assert b"".join(open_source(tmp_path / "split").chunks()) == whole


def load_whole(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def mapped(**changes: object) -> Callable[[Path], None]:
    """Returns a change of the index, which maps tensors to other files, or to None for no file."""

    def change(folder: Path) -> None:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"] | changes
        write_index(folder, {name: file for name, file in weight_map.items() if file is not None})

    return change


def index(text: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode()) and None


def saved(name: str, change: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Callable[[Path], None]:
    return lambda folder: save_file(FILES.get(name, {}) | change, folder / name, metadata or {"format": "pt"})


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def huge(folder: Path) -> None:
    with (folder / INDEX).open("r+b") as file:
        file.truncate(parameter_source.MAX_INDEX_BYTES + 1)


def a_folder_in_its_place(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).mkdir()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (mapped(norm="../other.safetensors"), '"../other.safetensors" is not the name of a .safetensors file'),
        (mapped(norm="/etc/x.safetensors"), "is not the name of a .safetensors file in the same folder"),
        (mapped(norm="a\\b.safetensors"), "is not the name of a .safetensors file in the same folder"),
        (mapped(norm="a\0.safetensors"), "is not the name of a .safetensors file in the same folder"),
        (mapped(norm="pytorch_model.bin"), "is not the name of a .safetensors file in the same folder"),
        (mapped(norm=".."), "is not the name of a .safetensors file in the same folder"),
        (mapped(norm=7), "a file's name is not a string"),
        (mapped(norm="line\nbreak\ud800.safetensors"), 'lacks "line\\nbreak\\ud800.safetensors"'),
        (mapped(norm="x" * 5000 + ".safetensors"), f'lacks "{"x" * 80}", which its index names'),
        (removed(SECOND), f'lacks "{SECOND}", which its index names: download or save the folder again'),
        (a_folder_in_its_place, f'lacks "{SECOND}", which its index names'),
        (saved("model-00003-of-00003.safetensors", {"x": torch.ones(1)}), "its index does not name: move that file"),
        (saved(FIRST, {"norm": torch.ones(33)}), f'has tensor "norm", which the index expects in "{SECOND}"'),
        (saved(FIRST, {"x": torch.ones(1)}), 'has tensor "x", which the index does not name'),
        (mapped(norm=None), 'has tensor "norm", which the index does not name'),
        (mapped(x=FIRST), 'lacks tensor "x", which the index expects there'),
        (mapped(norm=FIRST), f'"{FIRST}" in '),
        (index("no JSON"), "is not the index of a model (Expecting value"),
        (index(b"\xff\xfe"), "is not the index of a model"),
        (index("[1, 2]"), "is not the index of a model (it has no weight_map)"),
        (index("{}"), "is not the index of a model (it has no weight_map)"),
        (index('{"weight_map": {}}'), "weight_map has no tensors"),
        (index('{"weight_map": ["a"]}'), "weight_map has no tensors"),
        (index('{"weight_map": ' + "[" * 200_000), "is not the index of a model"),
        (index('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}'), 'it names "a" twice'),
        (huge, "100000001 bytes, but at most 100000000 are read"),
        (lambda folder: (folder / SECOND).write_bytes(b"short"), f"{SECOND} is not a safetensors file"),
        (saved(SECOND, {}, {"atoll.versions": "1,2"}), 'from a different export than the earlier files ("atoll.v'),
        (removed(INDEX), f"has neither {INDEX} nor model.safetensors: give a safetensors file, or a folder"),
    ],
    ids=range(29),
)  # fmt: skip
def test_an_invalid_folder_gives_a_one_line_error(folder, damage, said):
    damage(folder)
    with pytest.raises(TensorFileError) as caught:
        open_source(folder)
    text = str(caught.value)
    assert said in text
    assert str(folder) in text
    assert "\n" not in text
    assert ": " in text
    text.encode()


def test_an_unreadable_path_gives_a_one_line_error(tmp_path):
    with pytest.raises(TensorFileError, match=r"nothing cannot be read \(No such file or directory\): check the path"):
        open_source(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(TensorFileError, match=r"loop cannot be read \(Too many levels of symbolic links\)"):
        open_source(tmp_path / "loop")


def test_headers_have_a_common_limit(folder, monkeypatch):
    monkeypatch.setattr(parameter_source, "MAX_HEADER_BYTES", 300)
    with pytest.raises(TensorFileError, match=r"the headers of the files in .* have more than 300 bytes"):
        open_source(folder)


def test_only_metadata_that_all_files_share_is_kept(tmp_path, folder):
    saved(FIRST, {}, {"format": "pt", "part": "1", "atoll.initial": '["norm"]'})(folder)
    saved(SECOND, {}, {"format": "pt", "part": "2", "atoll.initial": '["norm"]'})(folder)
    staged(folder, tmp_path / "run")
    kept = open_tensors(tmp_path / "run" / "initial.safetensors").metadata
    assert kept == {"format": "pt", "atoll.initial": '["norm"]'}


def test_a_file_that_shrinks_or_changes_during_the_copy_is_refused(tmp_path, folder, monkeypatch):
    source = open_source(folder)
    content = bytearray((folder / SECOND).read_bytes())
    (folder / SECOND).write_bytes(content[:-10])
    with pytest.raises(TensorFileError, match=f"{SECOND} became shorter while it was read"):
        stage_source(source, tmp_path / "run")
    (folder / SECOND).write_bytes(content)

    def changing() -> Any:
        yield from source.chunks()
        content[-1] ^= 1
        (folder / SECOND).write_bytes(content)

    class Changing:
        size_bytes = source.size_bytes
        chunks = staticmethod(changing)

    staging = stage_source(Changing(), tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(Exception, match="damaged in transit"):
        staging.check(SPECS)
    staging.close()
    assert list((tmp_path / "run" / STAGING).iterdir()) == []


MEASURED = r"""
import re, sys
from pathlib import Path
from atoll_server.checkpoints.parameter_source import open_source
from atoll_server.cli.export_target import export_target
from atoll_server.run.initial_parameters import stage_source
folder, run, out = map(Path, sys.argv[1:])
def peak():  # ru_maxrss would include the parent's memory at the fork
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
staging = stage_source(open_source(folder), run)
with export_target(out, 30 << 20) as target:
    for chunk in open_source(staging._part).chunks():
        target.write(chunk)
assert staging.received > 80 << 20
staging.close()
print(peak() - before)
"""


def test_neither_the_copy_nor_the_split_holds_a_tensor_in_memory(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "run" / STAGING).mkdir(parents=True)
    weight_map = {}
    for number, megabytes in enumerate((40, 40)):
        tensors = {f"t{number}": torch.zeros(megabytes << 18), f"u{number}": torch.zeros(9)}
        save_file(tensors, tmp_path / "model" / f"{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{number}.safetensors")
    write_index(tmp_path / "model", weight_map)
    paths = [str(tmp_path / name) for name in ("model", "run", "out")]
    done = subprocess.run([sys.executable, "-c", MEASURED, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4
    assert int(done.stdout) < 16 << 10, "16 MiB must suffice, although a tensor has 40 MiB"


def test_all_bytes_of_a_file_are_read_in_order(folder, monkeypatch):
    monkeypatch.setattr(parameter_source, "COPY_BYTES", 100)
    content = (folder / SECOND).read_bytes()
    assert b"".join(open_source(folder / SECOND).chunks()) == content
