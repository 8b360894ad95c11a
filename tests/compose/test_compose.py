"""`docker compose up` on a real engine: services become healthy, train, and come back after a kill."""

from __future__ import annotations

import re
import shlex
import subprocess
import urllib.error

import pytest
from atoll_wire.security.certificate import read_certificate

from tests.compose.stack import LEARNERS, PROJECT, ROOT, Stack, until
from tests.documents.fences import fences

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

UP_S = 120.0
REGIONS = ("eu", "us", "ap")
LASTING = [
    "core",
    *(f"{part}-{region}" for region in REGIONS for part in ("relay", "front")),
    *LEARNERS,
    "prometheus",
    "alertmanager",
    "dashboard",
]
LABEL = f"com.docker.compose.project={PROJECT}"
KILL = "kill -9 $(cat /proc/1/task/1/children)"  # crashes the container's main process from inside
DONE = ("merged", "refused")


def test_everything_is_healthy_within_two_minutes_after_the_build(stack, up):
    assert all(stack.healthy(service) for service in LASTING)
    assert [each["State"]["ExitCode"] for each in stack.containers("certs")] == [0]
    assert len(stack.containers("learner-eu")) == 2
    assert up < UP_S


def test_the_first_start_logs_no_warnings_and_no_errors(stack, up):
    until(lambda: _all_train(stack))
    ours = [name for name in LASTING if name not in {"prometheus", "alertmanager"}]
    lines = stack.compose("logs", "--no-color", "certs", "backup", *ours).splitlines()
    bad = [line for line in lines if re.search(r"\[(warning|error|critical) |error:|Traceback|\| [EW]\d{4} ", line)]
    assert not [line for line in bad if "the disk is slow" not in line], "a new user would look for a fault"


def test_a_second_build_recreates_no_container(stack, up):
    """Compose writes a service's name into the image that it builds, so two services that build it differ."""

    def ids() -> set[str]:
        return set(stack.compose("ps", "--all", "--quiet").split())

    before = ids()
    wait = ["--detach", "--pull", "never", "--wait", "--wait-timeout", "200"]
    stack.compose("up", "--build", *wait, timeout=600)
    assert ids() == before
    stack.compose("build", timeout=300)
    stack.compose("up", *wait, timeout=300)
    assert ids() == before
    assert not stack.docker("image", "ls", "--quiet", "--filter", "dangling=true", "--filter", f"label={LABEL}")


def test_images_contain_only_what_they_need(stack):
    def files(image: str) -> set[str]:
        look = "ls /opt/atoll/lib/python*/site-packages /opt/atoll/src; du -sm /opt/atoll | cut -f1; id -u"
        return set(stack.docker("run", "--rm", "--entrypoint", "sh", f"atoll-{image}:{stack.tag}", "-c", look).split())

    for image, package, most_mb in (
        ("core", "atoll_server", 600), ("front", "atoll_server", 300), ("dashboard", "atoll_dashboard", 300)
    ):  # fmt: skip
        found = files(image)
        assert {"atoll_wire", package, "grpc", "10001"} <= found
        assert not {"torch", "atoll"} & found
        assert max(int(word) for word in found if word.isdigit() and word != "10001") <= most_mb
    assert not {"numpy", "numba"} & (files("front") | files("dashboard"))


def test_the_core_is_backed_up_while_it_runs(stack, up):
    def backups() -> list[str]:
        return stack.compose("exec", "-T", "backup", "sh", "-c", "ls /var/lib/backups/core || true").split()

    newest = until(lambda: [name for name in backups() if name.endswith("Z")])[-1]
    verified = stack.compose(
        "exec", "-T", "backup", "start", "atoll", "checkpoint", "verify", f"/var/lib/backups/core/{newest}"
    )
    assert "a core can start from" in verified


def test_the_documented_commands_list_certificates_and_take_the_operators(stack, up, tmp_path):
    pages = [ROOT / "docs/operate" / name for name in ("security.md", "deploy.md")]
    lines = [line for page in pages for fence in fences(page) for line in fence.text.splitlines()]
    (listing,) = [line for line in lines if "certs list" in line and line.startswith("docker compose ")]
    listed = stack.compose(*shlex.split(listing)[2:])
    shown = stack.compose("exec", "-T", "learner-us", "atoll", "certs", "show", "/etc/atoll/tls/learner")
    (serial,) = re.findall(r"^serial +(\S+)", shown, re.MULTILINE)
    assert serial in listed

    (copy,) = [line for line in lines if "--entrypoint tar operator" in line]
    taken, unpack = copy.split(" | ")
    archive = stack.compose(*shlex.split(taken)[2:]).encode()
    subprocess.run(shlex.split(unpack), input=archive, cwd=tmp_path, check=True)
    assert read_certificate(tmp_path / "operator").identity == "operator/demo"


def test_containers_have_no_capabilities_and_have_memory_limits(stack, up):
    for service in [*LASTING, "backup"]:
        for each in stack.containers(service):
            host = each["HostConfig"]
            assert host["ReadonlyRootfs"], service
            assert host["CapDrop"] == ["ALL"]
            assert host["Memory"] > 0
            assert host["PidsLimit"] > 0
            assert host["LogConfig"]["Config"]["max-size"] == "10m"
            assert service in {"prometheus", "alertmanager"} or each["Config"]["User"] == "10001:10001"


def test_only_relays_connect_regions(stack, up):
    def joined(service: str) -> set[str]:
        (first, *_) = stack.containers(service)
        return {name.removeprefix(f"{PROJECT}_") for name in first["NetworkSettings"]["Networks"]}

    assert joined("core") == {"home"}
    for region in REGIONS:
        assert joined(f"relay-{region}") == {"home", f"wan-{region}"}
        assert joined(f"front-{region}") == {f"wan-{region}", region}
        assert joined(f"learner-{region}") == {region}


def test_the_loss_falls_and_prometheus_sees_every_process(stack, up):
    def targets() -> dict[str, str]:
        return {each["metric"]["instance"]: each["value"][1] for each in stack.measure("up")}

    until(lambda: len(targets()) == 8 and set(targets().values()) == {"1"})
    losses = [each["loss"] for each in until(lambda: _all_train(stack))]
    assert len(losses) == 4
    until(lambda: max(each["loss"] for each in stack.status()["learners"]) < min(losses) - 0.3, 300)
    assert float(stack.measure("sum(atoll_contributions_total{fate='merged'})")[0]["value"][1]) > 0
    through = stack.measure("sum by (region) (atoll_front_wan_bytes_total{direction='down', kind='update'}) > 0")
    assert {each["metric"]["region"] for each in through} == set(REGIONS)


def _all_train(stack: Stack) -> list[dict]:
    learners = stack.status()["learners"]
    return learners if len(learners) == 4 and all(int(each.get("steps", 0)) > 10 for each in learners) else []


def test_the_dashboard_shows_the_run_and_acts_with_an_operators_token(stack, up):
    until(lambda: stack.page("run")["learners"]["live"] == 4)
    assert {each["region"] for each in stack.page("regions")} == set(REGIONS)
    assert stack.page("run")["actions"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        stack.page("actions/checkpoint", token="nonsense")
    assert refused.value.code == 401
    token = stack.compose("run", "--rm", "operator-token").strip()
    assert "is durable" in stack.page("actions/checkpoint", token=token)["said"]


@pytest.mark.parametrize("service", ["core", "relay-eu", "front-us", "learner-ap", "prometheus", "dashboard"])
def test_crashed_containers_restart_by_themselves(stack, up, service):
    steps, starts = _steps(stack), _started(stack, service)
    stack.compose("exec", "-T", service, "sh", "-c", f"{KILL} || true")
    until(lambda: _started(stack, service) != starts and stack.healthy(service))
    until(lambda: _steps(stack) > steps)
    _nothing_is_lost(stack)


@pytest.mark.parametrize("service", LASTING)
def test_up_restarts_containers_that_were_killed_through_the_engine(stack, up, service):
    """The engine treats `docker kill` as the user's intention, and does not restart the container."""
    (first, *_) = stack.containers(service)
    before = {} if service == "core" else stack.receipts()
    stack.docker("kill", first["Id"])
    stack.compose("up", "--detach", "--no-build", "--pull", "never", "--wait", "--wait-timeout", "200", timeout=300)
    assert stack.healthy(service)
    _kept(before, stack.receipts())
    _nothing_is_lost(stack)


def test_a_region_trains_while_its_link_is_cut(stack, up):
    def heard(region: str) -> float:
        return min(each.get("last_seen_age_s", 0.0) for each in stack.status()["learners"] if each["region"] == region)

    def trained() -> float:
        query = f"sum(atoll_local_inner_steps_total{{job='atoll-learner', learner=~'{name}.*'}})"
        return float(stack.measure(query)[0]["value"][1])

    name = "ap[.]"
    stack.compose("kill", "--signal", "SIGUSR1", "relay-ap")
    try:
        until(lambda: heard("ap") > 10)
        before = trained()
        until(lambda: trained() > before + 5)
    finally:
        stack.compose("kill", "--signal", "SIGUSR2", "relay-ap")
    until(lambda: heard("ap") < 2)
    _nothing_is_lost(stack)


def test_a_core_is_upgraded_under_load_and_loses_nothing(stack, up):
    newer = f"{stack.tag}-newer"
    stack.docker("tag", f"atoll-core:{stack.tag}", f"atoll-core:{newer}")
    until(lambda: _all_train(stack))
    before, epoch = stack.receipts(), int(stack.status()["epoch"])
    stack.compose(
        "up", "--detach", "--no-deps", "--no-build", "--pull", "never", "--wait", "core", timeout=300, ATOLL_TAG=newer
    )
    (core,) = stack.containers("core")
    assert core["Config"]["Image"] == f"atoll-core:{newer}"
    assert int(stack.status()["epoch"]) == epoch + 1
    after = stack.receipts()
    _kept(before, after)
    until(lambda: len([each for each in stack.receipts().values() if each["fate"] == "merged"]) > len(after))
    _nothing_is_lost(stack)


def test_one_option_adds_learners(stack, up):
    stack.compose("up", "--detach", "--no-build", "--pull", "never", "--scale", "learner-us=2", "--wait", timeout=300)
    until(lambda: sum(each["region"] == "us" and each["state"] == "live" for each in stack.status()["learners"]) == 2)


def test_down_leaves_nothing(stack, up):
    stack.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "10", timeout=200)
    for kind in ("container", "network", "volume"):
        everything = ["--all"] if kind == "container" else []
        assert stack.docker(kind, "ls", "--quiet", *everything, "--filter", f"label={LABEL}") == ""


def _steps(stack: Stack) -> int:
    """Returns the sum of all learners' reported steps."""
    return int(float(stack.measure("sum(atoll_local_inner_steps_total{job='atoll-learner'})")[0]["value"][1]))


def _started(stack: Stack, service: str) -> list[str]:
    return [each["State"]["StartedAt"] for each in stack.containers(service)]


def _kept(before: dict, after: dict) -> None:
    """Checks that acknowledged contributions still exist, with unchanged final fates."""
    assert before.keys() <= after.keys()
    for key, receipt in before.items():
        if receipt["fate"] in DONE:
            assert after[key] == receipt


def _nothing_is_lost(stack: Stack) -> None:
    """Checks that each acknowledged contribution is counted once."""
    status, receipts = stack.status(), stack.receipts()
    counts = {name: int(status["contributions"].get(name, 0)) for name in ("accepted", "merged", "refused", "pending")}
    assert counts["accepted"] == counts["merged"] + counts["refused"] + counts["pending"]
    assert len(receipts) >= counts["accepted"]
