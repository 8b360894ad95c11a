"""Samples within syncs become CPU seconds by process and kind of work. Other samples are left out."""

from __future__ import annotations

import pytest

from benchmarks.data_plane import cpu_profile

LINES = """\
  100  10.500000:      7f50a1 PyObject_GetAttr (/usr/lib/libpython3.11.so.1.0)
  100  10.600000: ffffffff810 copy_page (inlined) ([kernel.kallsyms])
  100  11.500000:      7f50a1 PyObject_GetAttr (/usr/lib/libpython3.11.so.1.0)
  200  10.700000:      7f65d1 [unknown] (/tmp/perf-200.map)
  200  20.100000:      7f65d1 [unknown] (/venv/lib/python3.11/site-packages/grpc/_cython/cygrpc.cpython-311-x86_64-linux-gnu.so)
  300  10.700000:      7f65d1 [unknown] (/usr/bin/python3.11)
perf: a message
"""  # noqa: E501 - as perf writes them


def test_samples_outside_syncs_and_of_other_processes_are_left_out():
    found = cpu_profile.seconds(
        [(10.0, 11.0), (20.0, 21.0)], {100: "core", 200: "learners"}, cpu_profile.samples(LINES.splitlines())
    )
    each = pytest.approx(1 / cpu_profile.RATE / 2)
    assert found == {
        ("core", "Python interpreter"): each,
        ("core", "Linux"): each,
        ("learners", "compiled kernels"): each,
        ("learners", "gRPC"): each,
    }


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("python3.13", "Python interpreter"), ("[vdso]", "Linux"), ("libc.so.6", "C library: copies, allocations"),
        ("_crc32c.cpython-311-x86_64-linux-gnu.so", "checksums"), ("libsqlite3.so.0.8.6", "other"),
        ("backend_c.cpython-311-x86_64-linux-gnu.so", "zstd"), ("libtorch_cpu.so", "torch, NumPy"),
    ],
)  # fmt: skip
def test_the_file_of_the_code_decides_the_kind_of_work(file, kind):
    assert cpu_profile.kind_of(file) == kind
