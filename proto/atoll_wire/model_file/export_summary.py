"""Describes a written export to the user: its size, run, versions and missing or initial values."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from atoll_wire.model_file.metadata_keys import FROZEN, GENERATION, RUN, VERSIONS
from atoll_wire.model_file.unshared_tensors import listed, missing_warning, warning

ADAPTER_CONFIG = "adapter_config.json"  # PEFT's name


def export_summary(out: Path) -> list[str]:
    """Returns lines about an export: what was written, and then a warning for each fault of the model.

    out: the file or folder of the export.

    Example: `["wrote model.safetensors (12.3 MB, run 3f9c1a20b7e4, generation 1, versions 40 to 42)"]`
    """
    files = sorted(out.glob("*.safetensors")) if out.is_dir() else [out]
    size = f"{sum(file.stat().st_size for file in files) / 1e6:.1f} MB"
    metadata = _metadata(files[0])
    versions = [int(version) for version in metadata[VERSIONS].split(",")]
    low, high = min(versions), max(versions)
    parts = [
        f"{size} in {len(files)} file{'s' if len(files) > 1 else ''}" if out.is_dir() else size,
        *([f"run {metadata[RUN]}", f"generation {metadata[GENERATION]}"] if RUN in metadata else []),
        f"version {low}" if low == high else f"versions {low} to {high}",
    ]
    is_adapter = (out / ADAPTER_CONFIG).exists()  # PEFT loads it over the base model
    frozen = "" if is_adapter else missing_warning(listed(metadata, FROZEN))
    faults = [warning(listed(metadata)) if high else "", frozen]
    return [f"wrote {out} ({', '.join(parts)})", *(f"warning: {fault}" for fault in faults if fault)]


def _metadata(file: Path) -> dict[str, str]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header: dict[str, dict[str, str]] = json.loads(opened.read(length))
    return header["__metadata__"]
