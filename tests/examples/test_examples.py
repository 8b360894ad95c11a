"""Each example runs at its smallest setting with a real core, in less than a minute: `make test-examples`."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import yaml
from atoll.demo.processes import Child

from tests.end_to_end.world import Core, core, eventually

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LONGEST_S = 60.0
NUMBERS = count(1)  # of processes, each with its own log
CORE = ("--fragments", "4", "--inner-steps", "8")
PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NEEDS_TRAINERS = ("hf_trainer", "lightning_module", "accelerate_loop", "lora_adapters")

# Example -> how it starts, its smallest settings, and what it prints.
ALONE = {
    "plain_loop": (PYTHON, "--steps 2000", r"step 2000: accuracy [01]\.\d+, \d+ contributions merged"),
    "torchrun_ddp": (TORCHRUN, "--steps 100", r"step 100: loss [\d.]+, \d+ contributions merged"),
    "data_units": (PYTHON, "--rows 4000 --epochs 1", r"loss [\d.]+: 4000 of 4000 rows were trained here"),
    "gpt": (
        PYTHON, "--steps 30 --width 32 --layers 2 --length 32 --curve {folder}/loss.png",
        r"step 30: held-out loss [\d.]+, \d+ merged",
    ),
    "hf_trainer": (PYTHON, "--steps 60", r"'atoll/run_tokens'"),
    "lightning_module": (PYTHON, "--steps 200", r"step 200: held-out error 0\.\d+"),
    "accelerate_loop": (PYTHON, "--steps 100", r"step 100: loss [\d.]+, .*atoll/run_tokens"),
    "lora_adapters": (PYTHON, "--steps 60", r"'atoll/run_tokens'"),
}  # fmt: skip
CASES = [
    pytest.param(name, marks=[pytest.mark.frameworks if name in NEEDS_TRAINERS else pytest.mark.ci]) for name in ALONE
]


@contextlib.contextmanager
def started(running: Core, name: str, *options: str, how: tuple[str, ...] = PYTHON) -> Iterator[Child]:
    """Context manager for a process of an example, which ends with the block. SIGTERM also ends torchrun's ranks."""
    command = [*how, str(EXAMPLES / f"{name}.py"), "--server", running.address, *options]
    child = running.group.start(f"{name}-{next(NUMBERS)}", command)
    try:
        yield child
    finally:
        running.group.stop(child)


def output(child: Child) -> str:
    """Returns the output of an example that must end in time without an error."""
    child.process.wait(LONGEST_S)
    text = child.log.read_text()
    assert child.process.returncode == 0, text
    return text


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_an_example_runs_and_its_work_is_merged(name, tmp_path):
    how, options, printed = ALONE[name]
    with core(tmp_path, *CORE) as running:
        began = time.monotonic()
        with started(running, name, "--name", "a", *options.format(folder=tmp_path).split(), how=how) as child:
            text = output(child)
        assert re.search(printed, text), text
        assert time.monotonic() - began < LONGEST_S
        eventually(lambda: running.status().contributions.merged > 0)
        eventually(lambda: running.status().contributions.pending == 0)
    if "--curve" in options:
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ci
def test_the_example_of_fsdp2_trains_on_two_ranks(tmp_path):
    with core(tmp_path, *CORE) as running:
        options = ("--name", "eu-west", "--steps", "60", "--checkpoints", str(tmp_path / "checkpoints"))
        with started(running, "torchrun_fsdp2", *options, how=TORCHRUN) as child:
            text = output(child)
        (learner,) = running.status().learners
    found = [(float(loss), versions) for loss, versions in re.findall(r"loss ([0-9.]+), versions (.*)", text)]
    assert len(found) == 6
    assert found[-1][0] < found[0][0]
    assert learner.tokens == 60 * 2 * 8 * 64
    assert any(int(version) > 0 for version in re.findall(r"\d+", found[-1][1]))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_follower_answers_with_a_model_that_improves(tmp_path):
    queries = 60
    with (
        core(tmp_path, *CORE) as running,
        started(running, "plain_loop", "--name", "a", "--steps", "3000") as loop,
        started(running, "follow_model", "--queries", str(queries)) as follower,
    ):
        text = output(follower)
        output(loop)
    found = [tuple(map(int, each)) for each in re.findall(r"versions (\d+) to (\d+)", text)]
    assert len(found) == queries
    assert found == sorted(found)
    assert found[-1] > found[0], text
    sure = [float(each) for each in re.findall(r"probability ([01]\.\d+)", text)]
    assert sure[-1] > sure[0] + 0.1, text


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_learners_share_the_units_and_a_killed_one_costs_nothing(tmp_path):
    rows = 100_000  # a fast machine must not finish them before the core counts the first units
    with core(tmp_path, *CORE, "--limit-units-silence-s", "2") as running:
        options = ("--rows", str(rows), "--epochs", "1")
        with (
            started(running, "data_units", "--name", "a", *options) as killed,
            started(running, "data_units", "--name", "b", *options) as other,
        ):
            eventually(lambda: len(running.status().datasets) == 1 and running.status().datasets[0].consumed > 20)
            killed.kill()
            output(other)
        eventually(lambda: running.status().datasets[0].consumed == rows // 32)
        dataset = running.status().datasets[0]
        assert (dataset.leased, dataset.returned) == (0, 0)
        with started(running, "data_units", "--name", "a", *options) as again:
            late = output(again)
        assert re.search(rf"loss [\d.]+: 0 of {rows} rows were trained here", late), late


def table() -> dict[str, list[str]]:
    """Returns the rows of the table in the examples' README, by file."""
    rows = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \| (.*) \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    return {file: row.split(" | ") for file, row in rows}


def test_the_table_has_each_example_with_its_length_and_command():
    files = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert table().keys() == files.keys()
    assert {Path(name).stem for name in files} == {*ALONE, "follow_model", "torchrun_fsdp2"}, "each example has a test"
    for name, (_, lines, command, minutes, _) in table().items():
        assert int(lines) == len(files[name].splitlines()), name
        assert command.strip("`").split(" --name")[0].split(" --server")[0] in files[name], name
        assert int(minutes) <= 10


@pytest.mark.ci
def test_the_gpt_example_needs_matplotlib_for_a_curve_before_it_trains():
    program = "import runpy, sys; del sys.argv[0]; sys.modules['matplotlib'] = None; runpy.run_path(sys.argv[0])"
    options = ("--name", "a", "--server", "127.0.0.1:1", "--curve", "loss.png")
    command = [*PYTHON, "-c", program, str(EXAMPLES / "gpt.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "error: --curve needs matplotlib: run `pip install '.[learner,plots]'`, or omit --curve"
    )


def test_the_slurm_script_is_bash():
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sh")], check=True)


def test_files_for_clusters_run_an_example_with_options_that_it_has():
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    for text in (task["run"], (EXAMPLES / "slurm.sh").read_text().replace("\\\n", " ").split("srun")[1]):
        script, options = re.findall(r"(examples/\w+\.py)(.*)", text)[0]
        source = (ROOT / script).read_text()
        wanted = re.findall(r"--([\w-]+)", options)
        assert len(wanted) > 3
        assert all(f'"--{option}"' in source or f'("{option}", ' in source for option in wanted), wanted
