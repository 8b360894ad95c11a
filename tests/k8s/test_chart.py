"""The chart as a whole: valid objects, clear refusals, and an effect of every value."""

from __future__ import annotations

import re
import shlex
import tomllib

import pytest
from atoll_server.quorum import Quorum
from atoll_server.settings import PRESETS, RunSettings

from tests.k8s import engine
from tests.k8s.cases import (
    CASES,
    ELSEWHERE,
    IN_BACKUP,
    IN_SHARDS,
    OTHERS,
    PARTS,
    REFUSED,
    SOUND,
    leaves,
    parsed,
    pods,
    program,
    schema,
)

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]  # the first test may have to install Helm's engine


def test_kubernetes_accepts_the_objects(rendered):
    for name in SOUND:
        assert rendered[name]["error"] == "", name
        assert rendered[name]["objects"], name
        assert rendered[name]["invalid"] == [], name


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_values_are_refused_with_a_helpful_message(rendered, name):
    assert REFUSED[name][1] in rendered[name]["error"]


def test_every_value_has_a_case():
    assert sorted(leaves()) == sorted(OTHERS)


def test_every_value_changes_something(rendered):
    for path in OTHERS:
        base = "elsewhere" if path in ELSEWHERE else "shards" if path in IN_SHARDS else "everything"
        if path.startswith(IN_BACKUP) and path != "core.backup.enabled":
            base = "backup"
        answer, before = rendered[f"other {path}"], rendered[base]
        assert (answer["manifest"], answer["notes"]) != (before["manifest"], before["notes"]), f"{path} changes nothing"


def test_every_component_can_be_deployed_alone(rendered):
    for name, parts in {
        "default": {"core"}, "home": {"core", "front", "dashboard"}, "remote": {"front", "learner"},
        "learner alone": {"learner"}, "dashboard alone": {"dashboard"}, "everything": set(PARTS),
    }.items():  # fmt: skip
        assert set(pods(rendered[name])) == parts


OF_COUNTS = {"minimum": "ge", "maximum": "le"}  # pydantic's names for limits of settings with units, such as 12B


def test_the_schema_has_the_run_settings_with_their_limits():
    """The schema refuses exactly the values that the program would refuse later."""
    options = [each for each in program().commands["core"].params if each.rich_help_panel == RunSettings.panel]
    settings = schema()["properties"]["core"]["properties"]["settings"]["properties"]
    flags = {"--" + re.sub("[A-Z]", lambda found: "-" + found[0].lower(), name) for name in settings}
    assert flags == {option.opts[0] for option in options}
    fields = {"overlap": "overlap_steps"}
    for name, limits in settings.items():
        option = re.sub("[A-Z]", lambda found: "_" + found[0].lower(), name)
        if name == "preset":
            assert set(limits["enum"]) == PRESETS.keys()
            continue
        said = RunSettings.model_json_schema()["properties"][fields.get(option, option)]
        for limit in {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"} - (
            {"minimum"} & {name == "quorum"}
        ):
            asked = said.get(limit, said.get(OF_COUNTS.get(limit, "")))
            assert limits.get(limit) == asked or name == "quorum", f"{name}: {limit}"
    pattern = settings["quorum"]["pattern"]
    for text in ("3", "0.5", "1.0", "50%", "62.5%", "100%"):
        assert re.search(pattern, text)
        Quorum.parse(text)
    assert not any(re.search(pattern, text) for text in ("", "0", "half", "-1", "5 %"))


def test_atoll_accepts_the_arguments(rendered):
    given = set()
    for name in SOUND:
        for part, pod in pods(rendered[name]).items():
            container, *others = pod["containers"]
            assert [each["name"] for each in others] in ([], ["backup"], ["standby"])
            if container.get("args") not in (None, ["x"]):  # unless it is a user's own container
                assert container["args"][0] == part
                given.add(tuple(container["args"]))
    assert len(given) > 20
    for words in given:
        params = parsed(list(words))
        quorum = params.get("quorum") and Quorum.parse(params["quorum"]).model_dump()
        settings = {field: params.get(option) for option, field in FIELDS.items()}
        RunSettings().changed(**settings, quorum=quorum)


FIELDS = {option: option for option in RunSettings.model_fields if option not in {"quorum", "overlap_steps"}} | {
    "overlap": "overlap_steps"
}


def test_numbers_have_no_exponent(rendered):
    """Helm reads numbers as floats, so 1000000 would become 1e+06."""
    everything = pods(rendered["everything"])
    assert "--max-staleness=1000000" in everything["core"]["containers"][0]["args"]
    assert "--cache=2000000MiB" in everything["front"]["containers"][0]["args"]
    assert "--price-per-gb=1000000" in everything["dashboard"]["containers"][0]["args"]


@pytest.mark.parametrize("name", ["home", "remote", "everything", "learner alone", "dashboard alone"])
def test_the_notes_name_existing_commands(rendered, name):
    commands = re.findall(r"(?:^  |-- )(atoll .*)$", rendered[name]["notes"], re.MULTILINE)
    assert commands
    for command in commands:
        parsed(shlex.split(command)[1:])


def test_the_notes_name_the_secrets_that_pods_wait_for(rendered):
    for name in ("home", "remote"):
        made = set(re.findall(r"create secret generic (\S+)", rendered[name]["notes"]))
        mounted = {
            v["secret"]["secretName"] for pod in pods(rendered[name]).values() for v in pod["volumes"] if "secret" in v
        }
        assert made == mounted


def test_the_notes_state_what_a_dashboard_needs_for_actions(rendered):
    for name, said in {
        "home": "need tokens, and the core accepts none: set core.operatorTokensSecret",
        "everything": "need the token that `atoll token YOUR-NAME` printed",
        "dashboard alone": "need a token of that core",
    }.items():
        assert f"Operator actions {said}" in rendered[name]["notes"]
        assert "port-forward service/atoll-dashboard 7080\n" in rendered[name]["notes"]
        assert ("The dashboard is also at atoll.example.com. " in rendered[name]["notes"]) == (name == "everything")
    assert "dashboard" not in rendered["remote"]["notes"]


def test_the_charts_version_equals_atolls():
    version = tomllib.loads((engine.ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = (engine.CHART / "Chart.yaml").read_text()
    assert f"\nversion: {version}\n" in chart
    assert f'\nappVersion: "{version}"\n' in chart


def test_case_names_are_unique():
    assert len(CASES) == len(SOUND) + len(REFUSED)
