"""The core's pod: its claims, a standby, and commands that an operator runs in the pod or with `helm test`."""

from __future__ import annotations

import pytest
from atoll_wire.security.certificate import Role

from tests.k8s.cases import one, parsed, pods

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]
RESOURCES = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}


def _stateful_set(answer: dict) -> dict:
    return one(answer, "StatefulSet", "atoll-core")["spec"]


@pytest.mark.parametrize("name", ["standby", "standby of shards"])
def test_a_standby_shares_the_cores_pod_and_differs_only_in_its_name(rendered, name):
    """Only processes of one machine may share the directory. Until it takes over, a standby opens no port."""
    spec = _stateful_set(rendered[name])["template"]["spec"]
    process, standby = spec["containers"]
    assert (process["name"], standby["name"]) == ("core", "standby")
    assert parsed(process["args"])["standby"] is True
    alike = ("image", "command", "args", "env", "resources", "securityContext")
    assert {key: process.get(key) for key in alike} == {key: standby.get(key) for key in alike}
    assert standby["resources"] == RESOURCES, "it needs the same memory after it takes over"
    mounts = [{each["mountPath"]: each["name"] for each in one["volumeMounts"]} for one in (process, standby)]
    assert mounts[1] == mounts[0] | {"/tmp": "standby-tmp"}  # noqa: S108
    assert {each["name"] for each in spec["volumes"]} >= {"tmp", "standby-tmp"}


def test_the_serving_container_answers_the_probes_of_both(rendered):
    process, standby = pods(rendered["standby"])["core"]["containers"]
    assert "ports" not in standby, "with two ports of one name, Prometheus would have two targets"
    for probe in ("startupProbe", "livenessProbe"):
        asked = process[probe] | {"httpGet": process[probe]["httpGet"] | {"port": 9100}}
        assert standby[probe] == asked
    assert "readinessProbe" not in standby
    assert {each["name"]: each["containerPort"] for each in process["ports"]}["metrics"] == 9100


def test_callers_reach_a_pod_in_which_only_the_standby_runs(rendered):
    """The pod is not ready while Kubernetes restarts the crashed container."""
    for service in ("atoll-core", "atoll-core-pods"):
        assert one(rendered["standby"], "Service", service)["spec"]["publishNotReadyAddresses"] is True
        assert "publishNotReadyAddresses" not in one(rendered["everything"], "Service", service)["spec"]


def test_without_a_standby_one_container_serves(rendered):
    (process,) = pods(rendered["everything"])["core"]["containers"]
    assert parsed(process["args"])["standby"] is False


def test_atoll_status_works_in_the_cores_pod(rendered):
    """`kubectl exec atoll-core-0 -- atoll status` calls the core of this pod as a viewer."""
    answer = rendered["everything"]
    (process,) = pods(answer)["core"]["containers"]
    variables = {each["name"]: each["value"] for each in process["env"]}
    assert variables == {"ATOLL_SERVER": "localhost:7070", "ATOLL_TLS": "/etc/atoll/viewer"}
    assert str(parsed(process["args"])["tls"]) == "/etc/atoll/tls", "the process has the core's certificate"
    (mount,) = [each for each in process["volumeMounts"] if each["mountPath"] == variables["ATOLL_TLS"]]
    assert mount["readOnly"]
    (volume,) = [each for each in pods(answer)["core"]["volumes"] if each["name"] == mount["name"]]
    made = one(answer, "Certificate", "atoll-viewer")["spec"]
    assert volume["secret"]["secretName"] == made["secretName"] == "atoll-viewer"
    assert volume["secret"]["optional"], "the core starts before the viewer's certificate exists"
    assert {each["path"] for each in volume["secret"]["items"]} == {"ca.pem", "cert.pem", "key.pem"}
    assert made["uris"] == [f"atoll://{Role.VIEWER.value}/atoll-core"]
    assert made["usages"] == ["digital signature", "client auth"]
    assert "localhost" in one(answer, "Certificate", "atoll-core")["spec"]["dnsNames"]
    assert "exec atoll-core-0 -- atoll status" in rendered["home"]["notes"]


def test_helm_test_asks_the_core_and_a_learners_front(rendered):
    answer = rendered["everything"]
    tests = {each["metadata"]["name"]: each for each in answer["objects"] if each["kind"] == "Pod"}
    assert set(tests) == {"atoll-test-core", "atoll-test-learner"}
    for pod in tests.values():
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
        assert pod["spec"]["restartPolicy"] == "Never"
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {each["mountPath"] for each in container["volumeMounts"]} == {"/etc/atoll/tls", "/tmp"}  # noqa: S108
    status, doctor = (tests[name]["spec"]["containers"][0]["command"] for name in sorted(tests))
    assert (status[:2], doctor[:2]) == (["atoll", "status"], ["atoll", "doctor"])
    assert parsed(status[1:])["server"] == "atoll-core:7070"
    assert list(parsed(doctor[1:])["server"]) == ["atoll-front:7071"]
    assert parsed(doctor[1:])["name"] == "eu.atoll-learner-0", "the learners' certificate covers this name"
    for name, secret in {"atoll-test-core": "atoll-viewer", "atoll-test-learner": "atoll-learner"}.items():
        assert [each["secret"]["secretName"] for each in tests[name]["spec"]["volumes"] if "secret" in each] == [secret]
    assert [each["metadata"]["name"] for each in rendered["home"]["objects"] if each["kind"] == "Pod"] == [
        "atoll-test-core"
    ]
    assert not any(each["kind"] == "Pod" for each in rendered["dashboard alone"]["objects"])


def test_claims_may_exist_already(rendered):
    core = _stateful_set(rendered["own claims"])
    assert "volumeClaimTemplates" not in core
    volumes = {each["name"]: each for each in core["template"]["spec"]["volumes"]}
    for name in ("run", "backups"):
        assert volumes[name]["persistentVolumeClaim"] == {"claimName": name}
    assert [each["metadata"]["name"] for each in _stateful_set(rendered["backup"])["volumeClaimTemplates"]] == [
        "run",
        "backups",
    ]


def test_claims_outlive_the_release_unless_asked_otherwise(rendered):
    field = "persistentVolumeClaimRetentionPolicy"
    assert _stateful_set(rendered["home"])[field] == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    assert _stateful_set(rendered[f"other core.{field}.whenDeleted"])[field]["whenDeleted"] == "Delete"


@pytest.mark.parametrize("part", ["core", "front"])
def test_a_load_balancer_admits_only_the_named_addresses(rendered, part):
    named = one(rendered[f"other {part}.service.loadBalancerSourceRanges"], "Service", f"atoll-{part}")["spec"]
    assert (named["type"], named["loadBalancerSourceRanges"]) == ("LoadBalancer", ["192.0.2.0/24"])
    assert "loadBalancerSourceRanges" not in one(rendered["everything"], "Service", f"atoll-{part}")["spec"]
