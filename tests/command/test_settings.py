"""Options match the settings classes: in `--help`, in the environment and in the docs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer
from atoll.chaos.settings import ChaosSettings
from atoll.demo.settings import DemoSettings
from atoll.doctor import DoctorSettings
from atoll.reference.model import SIZES
from atoll.reference.settings import JoinSettings, Size, TrainSettings
from atoll_dashboard.settings import DashboardSettings
from atoll_server.front.settings import FrontSettings
from atoll_server.settings import CoreSettings, RunSettings
from atoll_wire.errors import SettingsError
from atoll_wire.process.settings import Certificates, Given, Logs, command, declared

from tests.command.test_command import run

ROOT = Path(__file__).parent.parent.parent
COMMANDS = {
    "core": (CoreSettings, RunSettings, Logs),
    "front": (FrontSettings, Logs),
    "dashboard": (DashboardSettings, Logs),
    "learner": (TrainSettings, JoinSettings, Logs),
    "doctor": (DoctorSettings,),
    "demo": (DemoSettings,),
    "chaos": (ChaosSettings,),
}
SHOWING = {"doctor", "demo", "chaos"}  # commands with --output
SETTINGS = [(each, cls) for classes in COMMANDS.values() for cls in classes for each in declared(cls)]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_each_setting_once_with_its_range_default_help_and_variable(name):
    shown = run(name, "--help", COLUMNS="500").stdout
    found = [(flag[1], flag[0]) for flag in re.finditer(r"^│ [* ]? *(--[a-z0-9-]+) .*$", shown, re.MULTILINE)]
    lines, options = dict(found), [each for cls in COMMANDS[name] for each in declared(cls)]
    shared = ["--help", *(["--output", "--json"] if name in SHOWING else [])]
    assert sorted(flag for flag, _ in found) == sorted([*shared, *(each.flag for each in options)])
    for each in options:
        line = lines[each.flag]
        assert f" {each.help} [" in line
        assert each.switch or f" {each.form} " in line
        assert f"[env var: {each.option.variable or f'ATOLL_{name}_{each.key}'.upper()}]" in line
        assert each.info.is_required() == ("[required]" in line)
        said = re.search(r"\[default: \(?(.*?)\)?\]", line)
        if not each.switch:
            assert (said[1] if said else "") == ", ".join(each.default.split())


def test_a_range_is_shown_in_words():
    ranges = {each.name: each.range for each in declared(RunSettings)} | {
        e.name: e.range for e in declared(CoreSettings)
    }
    for name, said in {
        "inner-steps": "1 to 100000", "overlap": "above 0 to 1000", "grace-ratio": "0 to below 1",
        "codec": "float32, int8 or int4",
        "keep-snapshots": "at least 2", "memory": "at least 1MiB", "limit-spool-bytes": "1 to 1024TiB",
    }.items():  # fmt: skip
        assert ranges[name] == said


def test_a_shown_default_can_be_given_as_a_value():
    for each, cls in SETTINGS:
        if not each.default or each.switch:
            continue
        required = {name: "x" for name, info in cls.model_fields.items() if info.is_required()}
        value = each.default.split() if each.several else each.default
        tree = value
        for name in reversed(each.path):
            tree = {name: tree}
        settings = cls.of(**required | tree)
        for name in each.path:
            settings = getattr(settings, name)
        assert settings == each.info.default, each.flag


@pytest.mark.ci
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("core --dir x --inner-steps 0", "input should be greater than or equal to 1"),
        ("core --dir x --overlap nan", "input should be a finite number"),
        ("core --dir x --outer-lr much", "input should be a valid number, unable to parse string as a number"),
        (
            "core --dir x --limit-spool-bytes 5gigs",
            "not a size: give bytes, or KiB, MiB, GiB, TiB, kB, MB, GB or TB, such as 64GiB",
        ),
        (
            "core --dir x --total-tokens 5GiB",
            "not a count: give a number, or K, M, B or T for a power of 1,000, such as 12B",
        ),
        ("core --dir x --limit-message-bytes 1KiB", "input should be greater than or equal to 548864"),
        ("core --dir x --quota-calls-per-s 0", "input should be greater than 0"),
        ("front --core x --cache 0", "input should be greater than or equal to 1048576"),
        ("dashboard --price-per-gb -1", "input should be greater than or equal to 0"),
        ("learner --size huge", "input should be 'tiny', '25m' or '124m'"),
        ("demo --steps 1", "input should be greater than or equal to 30"),
        ("chaos --pauses 2", "input should be less than or equal to 1"),
    ],
)
def test_an_invalid_value_is_refused_in_one_line(typed, said):
    name, *_, flag, value = typed.split()
    done = run(*typed.split())
    assert (done.returncode, done.stderr) == (2, f"error: {flag} {value}: {said}; see atoll {name} --help\n")


def test_environment_variables_set_limits(tmp_path):
    done = run("core", "--dir", str(tmp_path), ATOLL_CORE_LIMIT_LEARNERS="none", ATOLL_CORE_LISTEN="0.0.0.0:0")
    assert done.stderr.startswith("error: --limit-learners none: input should be a valid integer")


def test_a_command_receives_given_values_and_declared_defaults():
    taken = []
    options = {each.key: None for cls in (CoreSettings, RunSettings, Logs) for each in declared(cls)}
    given = {"dir": "here", "quorum": "50%", "limit_spool_bytes": "2MiB", "quota_joins_burst": "7", "codec": "int8"}
    command(lambda *all_: taken.extend(all_), CoreSettings, Given(RunSettings), Logs)(**options | given)
    settings, run_settings, logs = taken
    assert (settings.directory, settings.limits.spool_bytes, settings.quotas.joins_burst) == (
        Path("here"),
        2 << 20,
        7.0,
    )
    assert settings.limits.calls == CoreSettings(directory=Path()).limits.calls
    assert run_settings.keys() == {"quorum", "codec"}
    assert RunSettings().changed(**run_settings) == RunSettings(quorum="50%", codec="int8")
    assert logs == Logs()


def test_an_invalid_nested_setting_is_named_by_its_option():
    with pytest.raises(SettingsError, match=r"^--limit-learners 0: input should be greater"):
        CoreSettings.of(directory=Path(), limits={"learners": 0})
    assert Certificates(tls=Path("a")).security.tls == Path("a")


def test_the_sizes_of_the_option_are_those_of_the_models():
    assert list(Size.__args__) == list(SIZES)


def test_showing_commands_loads_neither_settings_nor_grpc():
    code = """
import sys
sys.argv = ["atoll", "--help"]
from atoll.cli import main
try:
    main()
except SystemExit:
    print(sorted({"pydantic", "grpc", "numpy", "numba", "torch", "prometheus_client"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_help_of_a_command_needs_no_heavy_packages():
    for name in ("core", "front", "dashboard", "learner"):
        code = f"""
import sys
for each in ("numba", "numpy", "zstandard", "torch", "psutil", "fastapi", "uvicorn"):
    sys.modules[each] = None  # importing it raises
sys.argv = ["atoll", "{name}", "--help"]
from atoll.cli import main
main()
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_an_export_from_a_core_needs_no_numerics():
    """A front's image has the operators' subcommands, but no numpy."""
    code = """
import sys
for each in ("numba", "numpy", "zstandard", "torch"):
    sys.modules[each] = None  # importing it raises
sys.argv = ["atoll", "checkpoint", "export", "out", "--max-file-size", "5GiB", "--server", "127.0.0.1:1"]
from atoll.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.startswith("error: no core answers at 127.0.0.1:1"), done.stderr


def test_the_table_of_run_settings_has_the_defaults():
    """docs/guides/tune.md explains each default."""
    rows = re.findall(r"^\| (`--[^|]+) \| ([^|]+) \|", (ROOT / "docs/guides/tune.md").read_text(), re.MULTILINE)
    said = {}
    for flags, defaults in rows:
        names = re.findall(r"`--([a-z-]+)`", flags)
        said |= dict(zip(names, defaults.split(", ") if len(names) > 1 else [defaults] * len(names), strict=True))
    options = {each.name: each.default for each in declared(RunSettings)}
    for name, default in said.items():
        # for these settings, 0 has a meaning that the table describes
        assert default.split(",")[0] == options[name] or options[name] == "0", name
    assert options.keys() - said.keys() == {"keep-snapshots", "record"}


def test_options_for_certificates_are_the_same_in_all_commands():
    """Commands that call a core as an operator declare --tls and --insecure-plaintext themselves."""
    for each in declared(Certificates):
        said = {(option.help, option.envvar or each.key) for option in _all_options() if each.flag in option.opts}
        assert said == {(each.help, each.option.variable or each.key)}


def test_docs_name_existing_options():
    known = {flag for option in _all_options() for flag in (*option.opts, *option.secondary_opts)}
    known |= {"--help", "--version"} | OTHERS
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for line in path.read_text().splitlines():
            command_line = re.match(r"\s*(\$ )?atoll [a-z]", line)
            quoted = [line] if command_line else re.findall(r"`(--[^`]+|atoll [^`]+)`", line)
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", " ".join(quoted)):
                family = flag.endswith("-") and any(each.startswith(flag) for each in known)  # as --limit-
                assert flag in known or family, f"{path.name}: {flag}"


# Options of Flower, Docker, pip, torchrun and a benchmark.
OTHERS = {"--root-certificates", "--restart", "--gpus", "--constraint", "--max-restarts", "--code-on", "--ranks"}


def _all_options() -> list:
    app = typer.Typer()
    for entry in entry_points(group="atoll.commands"):
        entry.load()(app)
    found, waiting = [], [typer.main.get_command(app)]
    while waiting:
        each = waiting.pop()
        waiting += getattr(each, "commands", {}).values()
        found += each.params
    return found
