"""The chart's objects as plain manifests, for users without Helm: `python -m tests.k8s.overlays` writes them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.k8s.engine import ROOT, render

OVERLAYS = ROOT / "k8s/overlays"
VALUES = {"home": "values-home.yaml", "remote": "values-remote.yaml"}
APART = {"monitoring.coreos.com": "monitoring.yaml", "grafana_dashboard:": "grafana.yaml"}
SOURCE = re.compile(r"^---\n# Source: .*\n", re.MULTILINE)
BY_HELM = re.compile(r"^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n|^ *\n", re.MULTILINE)


def manifests(overlay: str, rendered: str) -> dict[Path, str]:
    """Returns the text of each file. Objects for the Prometheus operator or Grafana have separate, optional files."""
    source = f"k8s/atoll with {VALUES[overlay]}"
    head = f"# Made from {source} by `python -m tests.k8s.overlays`: change kustomization.yaml instead.\n"
    parts = [BY_HELM.sub("", part.strip() + "\n") for part in SOURCE.split(rendered)[1:]]
    files: dict[Path, str] = {}
    for part in parts:
        name = next((name for mark, name in APART.items() if mark in part), "atoll.yaml")
        path = OVERLAYS / overlay / name
        files[path] = files.get(path, head) + "---\n" + part
    return files


def main() -> None:
    """Writes all manifests."""
    for overlay, rendered in render({name: [values] for name, values in VALUES.items()}).items():
        for path, text in manifests(overlay, rendered["manifest"]).items():
            path.write_text(text)


if __name__ == "__main__":
    main()
