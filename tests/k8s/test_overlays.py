"""The overlays match the chart, and they build."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.k8s.overlays import OVERLAYS, VALUES, manifests

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]


@pytest.mark.parametrize("overlay", VALUES)
def test_overlays_equal_the_charts_output(rendered, overlay):
    made = manifests(overlay, rendered[overlay]["manifest"])
    assert {path.name for path in made} | {"kustomization.yaml"} == {
        each.name for each in (OVERLAYS / overlay).iterdir()
    }
    for path, text in made.items():
        assert path.read_text() == text, f"{path} is out of date: run `python -m tests.k8s.overlays`"
        assert text.count("\nkind: ") == text.count("\n---\n") > 0, "each object must appear once"


@pytest.mark.parametrize("overlay", VALUES)
def test_overlays_build_and_keep_the_charts_values(overlay, tmp_path):
    """The editable parts in kustomization.yaml have the chart's values."""
    files = [path for path in (OVERLAYS / overlay).iterdir() if path.name != "kustomization.yaml"]
    for path in files:
        (tmp_path / path.name).write_text(path.read_text())
    resources = "\n".join(f"  - {path.name}" for path in files)
    (tmp_path / "kustomization.yaml").write_text(f"namespace: atoll\nresources:\n{resources}\n")
    built, plain = _built(OVERLAYS / overlay), _built(tmp_path)
    assert built == plain
    assert built.count("\nkind: ") == sum(path.read_text().count("\nkind: ") for path in files)


def test_another_region_needs_few_lines(tmp_path):
    for path in (OVERLAYS / "remote").iterdir():
        text = path.read_text()
        if path.name == "kustomization.yaml":
            for line in ("replace, path: /spec/template/spec/containers/0/args/3, value: --region=",
                         "replace, path: /spec/template/spec/containers/0/args/2, value: --region="):  # fmt: skip
                assert text.count(line + "eu") == 1
                text = text.replace(line + "eu", line + "us")
        (tmp_path / path.name).write_text(text)
    built = _built(tmp_path)
    assert built.count("- --region=us\n") == 2
    assert "--region=eu" not in built


def _built(folder: Path) -> str:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
