"""Generated code matches the .proto files, and repeated numbers are equal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from atoll_wire import outer_pb2 as pb
from atoll_wire.layout.frame_spans import Codec

ROOT = Path(__file__).parent.parent
SERVED = ("python", "pyi", "grpc_python")
KINDS = {"outer": SERVED, "ranks": ("python", "pyi"), "shards": SERVED}
SUFFIXES = {"python": "_pb2.py", "pyi": "_pb2.pyi", "grpc_python": "_pb2_grpc.py"}
NAMES = [f"{name}{SUFFIXES[kind]}" for name, kinds in KINDS.items() for kind in kinds]


def test_generated_code_does_not_drift_from_the_proto(tmp_path):
    for name, kinds in KINDS.items():
        command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", f"proto/atoll_wire/{name}.proto"]
        subprocess.run([*command, *(f"--{kind}_out={tmp_path}" for kind in kinds)], cwd=ROOT, check=True)
    for name in NAMES:
        assert (tmp_path / "atoll_wire" / name).read_text() == (ROOT / "proto/atoll_wire" / name).read_text()


def test_codecs_have_the_numbers_of_the_contract():
    assert {f"CODEC_{codec.name}": int(codec) for codec in Codec} | {"CODEC_UNSPECIFIED": 0} == dict(pb.Codec.items())
