"""Each kubectl command of the runbooks names pods, services, containers and paths that the chart renders."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.documents.runbook_commands import KUBECTL, RunbookCommand, commands
from tests.k8s.cases import one, parsed

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]

CASE = "everything"  # core, front, learner and dashboard in one release, with a viewer's certificate
NAMESPACE = "atoll"  # of the release
MONITORING = "monitoring"  # the namespace of Prometheus, which the chart does not install
TOOLS = {"tail", "du", "sh"}  # in the base image


@dataclass(frozen=True, slots=True)
class Workload:
    """A StatefulSet or Deployment of the chart."""

    thing: dict[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        return self.thing["spec"]["template"]["metadata"]["labels"]  # type: ignore[no-any-return]

    @property
    def container(self) -> dict[str, Any]:
        """The container that kubectl uses by default: the first one."""
        return self.thing["spec"]["template"]["spec"]["containers"][0]  # type: ignore[no-any-return]

    @property
    def names(self) -> set[str]:
        """The names under which kubectl finds the workload: those of its pods, or deployment/NAME."""
        name = self.thing["metadata"]["name"]
        if self.thing["kind"] == "Deployment":
            return {f"deployment/{name}"}
        return {f"{name}-{number}" for number in range(self.thing["spec"]["replicas"])}


def _workloads(answer: dict[str, Any]) -> list[Workload]:
    return [Workload(each) for each in answer["objects"] if each["kind"] in {"StatefulSet", "Deployment"}]


def _named(answer: dict[str, Any], name: str) -> Workload:
    (found,) = [each for each in _workloads(answer) if name in each.names]
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    logs, run, describe, forward, get = (
        verbs.add_parser(name) for name in ("logs", "exec", "describe", "port-forward", "get")
    )
    for verb in (logs, run, describe, forward, get):
        verb.add_argument("--namespace", required=True)
    logs.add_argument("--tail", type=int), logs.add_argument("--since"), logs.add_argument("--selector")
    logs.add_argument("--previous", action="store_true"), logs.add_argument("--prefix", action="store_true")
    logs.add_argument("pod", nargs="?")
    run.add_argument("pod")
    describe.add_argument("kind", choices=["pod"]), describe.add_argument("pod")
    forward.add_argument("service"), forward.add_argument("port", type=int)
    get.add_argument("kind", choices=["pods"])
    return parser


@pytest.mark.parametrize("command", commands(KUBECTL), ids=str)
def test_a_kubectl_command_names_what_the_chart_renders(command: RunbookCommand, rendered):
    answer = rendered[CASE]
    own, _, inside = command.text.partition(" -- ")
    given = _parser().parse_args(shlex.split(own)[1:])
    assert given.namespace == (MONITORING if given.verb == "get" else NAMESPACE)
    if given.verb == "port-forward":
        service = one(answer, "Service", given.service.removeprefix("service/"))
        assert given.port in {each["port"] for each in service["spec"]["ports"]}
    elif getattr(given, "selector", None):
        key, value = given.selector.split("=")
        assert [each for each in _workloads(answer) if each.labels.get(key) == value]
    elif given.verb != "get":
        found = _named(answer, given.pod)
        assert found.container["name"] == found.labels["app.kubernetes.io/component"]
        assert bool(inside) == (given.verb == "exec")
        if inside:
            _can_run(shlex.split(inside), found.container, answer)


def _can_run(words: list[str], container: dict[str, Any], answer: dict[str, Any]) -> None:
    """Checks that a container has the command, its options, and the files and addresses that it names."""
    assert words[0] == "atoll" or words[0] in TOOLS
    if words[0] == "atoll":
        parsed(words[1:])
    if words[0] == "tail":
        options = {str(value) for value in parsed(container["args"]).values()}
        assert options.issuperset(words[1:]), f"the container writes none of {words[1:]}"
    mounts = [PurePosixPath(each["mountPath"]) for each in container["volumeMounts"]]
    for word in words[1:]:
        if word.startswith("/"):
            assert any(PurePosixPath(word).is_relative_to(mount) for mount in mounts), f"{word} is in no volume"
        if word.startswith("atoll-"):
            host, port = word.split(":")
            assert int(port) in {each["port"] for each in one(answer, "Service", host)["spec"]["ports"]}


@pytest.mark.parametrize("wrong", [
    "kubectl logs --namespace atoll --tail 50 atoll-core-7",
    "kubectl logs --namespace other --tail 50 atoll-core-0",
    "kubectl exec --namespace atoll deployment/atoll-front -- tail /var/audit.jsonl",
    "kubectl exec --namespace atoll deployment/atoll-front -- tail /tmp/other.jsonl",
    "kubectl exec --namespace atoll atoll-core-0 -- atoll doctor --directory /var/lib/atoll/run",
    "kubectl exec --namespace atoll deployment/atoll-front -- atoll doctor --server atoll-core:7071",
    "kubectl delete --namespace atoll pod atoll-core-0",
])  # fmt: skip
def test_a_wrong_command_is_found(wrong: str, rendered):
    with pytest.raises((Exception, SystemExit)):
        test_a_kubectl_command_names_what_the_chart_renders(RunbookCommand(wrong), rendered)


def test_a_viewer_can_query_the_core_in_its_pod(rendered):
    core = _named(rendered[CASE], "atoll-core-0").container
    variables = {each["name"]: each.get("value") for each in core["env"]}
    assert variables == {"ATOLL_TLS": "/etc/atoll/viewer", "ATOLL_SERVER": "localhost:7070"}
    assert {"name": "viewer", "mountPath": "/etc/atoll/viewer", "readOnly": True} in core["volumeMounts"]
    hosts = one(rendered[CASE], "Certificate", "atoll-core")["spec"]["dnsNames"]
    assert "localhost" in hosts
    assert "--tls=/etc/atoll/tls" in core["args"], "the core's own certificate takes precedence over the variable"
