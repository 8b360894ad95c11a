"""Pod templates: no unneeded permissions, and no restart of a process that is only slow."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest
from atoll.agent.join_request import own_name
from atoll.reference.settings import JoinSettings
from atoll_dashboard.settings import DashboardSettings
from atoll_dashboard.web.headers import Headers
from atoll_dashboard.web.server import STOP_S
from atoll_server.rpc.process import GRACE_S
from atoll_wire.security.certificate import ANY, NAME, Role, allows_name
from starlette.responses import PlainTextResponse

from tests.k8s.cases import DIGEST, PARTS, one, parsed, pods

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]
CASES = ["default", "home", "remote", "everything"]


def _container(pod: dict) -> dict:
    """Returns the container of the component."""
    container, *others = pod["containers"]
    assert [each["name"] for each in others] in ([], ["backup"], ["standby"])
    return container


@pytest.mark.parametrize("name", CASES)
def test_containers_have_no_capabilities(rendered, name):
    for pod in pods(rendered[name]).values():
        asked = pod["securityContext"]
        assert asked["runAsNonRoot"]
        assert asked["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {asked["runAsUser"], asked["runAsGroup"], asked["fsGroup"]} == {10001}
        assert _container(pod)["securityContext"] == {
            "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
        }  # fmt: skip
        assert pod["automountServiceAccountToken"] is False
        assert one(rendered[name], "ServiceAccount", pod["serviceAccountName"])["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", CASES)
def test_kubernetes_sets_no_variables_that_atoll_would_read(rendered, name):
    """For a Service named atoll-core, Kubernetes would set ATOLL_CORE_PORT and others."""
    assert all(pod["enableServiceLinks"] is False for pod in pods(rendered[name]).values())


@pytest.mark.parametrize("part", [part for part in PARTS if part != "dashboard"])
def test_probes_use_existing_paths(rendered, part):
    container = _container(pods(rendered["everything"])[part])
    port = int(parsed(container["args"])["metrics_listen"].rpartition(":")[2])
    assert {"name": "metrics", "containerPort": port, "protocol": "TCP"} in container["ports"]
    probes = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    if part == "learner":  # it may wait for hours to join, and runs the user's code after training
        probes = {"readinessProbe": "/readyz"}
    assert {name for name in container if name.endswith("Probe")} == set(probes)
    for probe, path in probes.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "metrics"}


@pytest.mark.parametrize("part", PARTS)
def test_a_process_serves_where_its_service_sends_callers(rendered, part):
    container = _container(pods(rendered["everything"])[part])
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    if part == "learner":
        assert set(ports) == {"metrics"}
        return
    name, listen = ("http" if part == "dashboard" else "grpc"), parsed(container["args"])["listen"]
    (listen,) = [listen] if isinstance(listen, str) else listen
    service = one(rendered["everything"], "Service", f"atoll-{part}")["spec"]
    assert listen == f"0.0.0.0:{ports[name]}"
    assert [(each["port"], each["targetPort"]) for each in service["ports"]] == [(ports[name], name)]


def test_a_start_may_take_as_long_as_configured(rendered):
    for name, part, least_s in [
        ("default", "core", 600), ("other core.restoreSeconds", "core", 60),
    ]:  # fmt: skip
        probe = _container(pods(rendered[name])[part])["startupProbe"]
        assert least_s <= probe["periodSeconds"] * probe["failureThreshold"] < least_s + probe["periodSeconds"]


def test_no_process_is_killed_while_it_ends_by_itself(rendered):
    everything = pods(rendered["everything"])
    a_snapshot_s, a_step_s = 120, 60
    least_s = {"core": GRACE_S + a_snapshot_s, "front": GRACE_S, "learner": a_step_s + JoinSettings().drain_s}
    least_s["dashboard"] = STOP_S
    for part, pod in everything.items():
        assert pod["terminationGracePeriodSeconds"] > least_s[part]


@pytest.mark.parametrize("name", CASES)
def test_every_container_requests_resources(rendered, name):
    for part, pod in pods(rendered[name]).items():
        resources = _container(pod)["resources"]
        assert resources["requests"]["cpu"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"], "memory must be guaranteed"
        assert ("nvidia.com/gpu" in resources["limits"]) == (part == "learner")


@pytest.mark.parametrize("name", CASES)
def test_certificates_are_a_directory_that_can_change(rendered, name):
    for part, pod in pods(rendered[name]).items():
        container = _container(pod)
        tls = parsed(container["args"])["tls"]
        (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == str(tls)]
        assert mount["readOnly"]
        assert not any("subPath" in each for each in container["volumeMounts"])
        (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
        assert volume["secret"]["secretName"] == f"atoll-{part}"
        assert volume["secret"]["defaultMode"] == 0o440


@pytest.mark.parametrize("part", PARTS)
def test_every_written_path_is_a_volume(rendered, part):
    """The root file system is read-only."""
    pod = pods(rendered["everything"])[part]
    mounts = {each["mountPath"]: each["name"] for each in _container(pod)["volumeMounts"] if not each.get("readOnly")}
    wanted = {"/tmp"} | ({"/dev/shm"} if part == "learner" else set())  # noqa: S108
    claims = {"core": {"run"}, "dashboard": {"history"}}.get(part, set())
    wanted |= {"/var/lib/atoll"} if claims else set()
    assert set(mounts) == wanted
    temporary = {each["name"]: each["emptyDir"] for each in pod["volumes"] if "emptyDir" in each}
    assert set(mounts.values()) - set(temporary) == claims
    assert all(each["sizeLimit"] for each in temporary.values())
    assert part != "learner" or temporary[mounts["/dev/shm"]]["medium"] == "Memory"  # noqa: S108


def test_there_is_one_core_and_it_keeps_its_disk(rendered):
    core = one(rendered["home"], "StatefulSet", "atoll-core")["spec"]
    assert core["replicas"] == 1
    assert core["updateStrategy"] == {"type": "RollingUpdate"}
    (claim,) = core["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    container = _container(core["template"]["spec"])
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == claim["metadata"]["name"]]
    assert Path(parsed(container["args"])["dir"]).is_relative_to(mount["mountPath"])
    assert one(rendered["home"], "Service", core["serviceName"])["spec"]["clusterIP"] == "None"


def _claims(answer: dict) -> list[dict]:
    return [each for each in answer["objects"] if each["kind"] == "PersistentVolumeClaim"]


@pytest.mark.parametrize(
    ("name", "claim"),
    [("home", "atoll-dashboard-history"), ("dashboard alone", "atoll-dashboard-history"),
     ("other dashboard.history.storage.existingClaim", "x")],
)  # fmt: skip
def test_the_dashboard_keeps_its_history_on_a_claim(rendered, name, claim):
    spec = one(rendered[name], "Deployment", "atoll-dashboard")["spec"]
    assert spec["strategy"] == {"type": "Recreate"}, "the old pod must release the history file first"
    pod = spec["template"]["spec"]
    (volume,) = [each for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert volume["persistentVolumeClaim"] == {"claimName": claim}
    (mount,) = [each for each in _container(pod)["volumeMounts"] if each["name"] == volume["name"]]
    assert Path(parsed(_container(pod)["args"])["history"]).parent == Path(mount["mountPath"])
    made = _claims(rendered[name])
    assert [each["metadata"]["name"] for each in made] == ([] if claim == "x" else [claim])
    assert all(each["spec"]["resources"]["requests"] == {"storage": "1Gi"} for each in made)


def test_a_dashboard_without_history_needs_no_claim(rendered):
    answer = rendered["other dashboard.history.enabled"]
    spec = one(answer, "Deployment", "atoll-dashboard")["spec"]
    assert "strategy" not in spec
    assert parsed(_container(spec["template"]["spec"])["args"])["history"] is None
    assert not _claims(answer)


@pytest.mark.parametrize("name", ["backup", "backup of shards", "backup to a volume"])
def test_backups_have_a_container_and_a_volume_of_their_own(rendered, name):
    core = one(rendered[name], "StatefulSet", "atoll-core")["spec"]
    pod = core["template"]["spec"]
    process, backup = pod["containers"]
    said = parsed(backup["args"])
    assert str(said["directory"]) == str(parsed(process["args"])["dir"])
    assert (said["every_s"], said["keep"]) == (3600.0, 3)
    assert backup["securityContext"] == process["securityContext"]
    assert backup["image"] == process["image"]
    assert backup["resources"]["limits"] == {"memory": "1Gi"}
    mounts = {each["mountPath"]: each["name"] for each in backup["volumeMounts"]}
    assert mounts["/var/lib/atoll"] == "run"
    assert "/etc/atoll/tls" not in mounts, "backups need no key"
    root = Path(str(said["root"]).replace("$(POD)", "atoll-core-0"))
    assert root == Path("/var/lib/backups/atoll-core-0"), "each shard has its own folder"
    assert mounts[str(root.parent)] == "backups"
    claims = {each["metadata"]["name"]: each["spec"] for each in core["volumeClaimTemplates"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert ("backups" in claims) != ("backups" in volumes)
    if name == "backup to a volume":
        assert volumes["backups"]["nfs"] == {"server": "x", "path": "/"}
    else:
        assert claims["backups"]["resources"]["requests"]["storage"] == "20Gi"


def test_nothing_is_backed_up_unless_it_is_asked_for(rendered):
    core = one(rendered["everything"], "StatefulSet", "atoll-core")["spec"]
    assert [each["metadata"]["name"] for each in core["volumeClaimTemplates"]] == ["run"]
    assert "backup" not in str(core["template"])


def _words(answer: dict, number: int) -> list[str]:
    """Returns the arguments that a pod's shell passes to `atoll`."""
    container = _container(one(answer, "StatefulSet", "atoll-core")["spec"]["template"]["spec"])
    pod = f"atoll-core-{number}"
    command = [*container["command"], *(each.replace("$(POD)", pod) for each in container["args"])]
    prints = 'start() { printf "%s\\n" "$@"; exit; }; '
    command[2] = prints + command[2].replace("exec ", "")
    done = subprocess.run(command, env={"POD": pod}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_each_pod_starts_the_shard_of_its_number(rendered):
    for number in range(3):
        program, *words = _words(rendered["shards"], number)
        said = parsed(words)
        assert (program, str(said["shard"])) == ("atoll", f"{number}/3")
        assert said["advertise"] == f"atoll-core-{number}.atoll-core-pods.atoll.svc:7070"
        assert said["registrar"] == (None if number == 0 else "atoll-core:7070")
        assert (said["inner_steps"], said["quorum"]) == (("48", "60%") if number == 0 else (None, None))
        assert said["operator_tokens"] is not None
    elsewhere = parsed(_words(rendered["other core.shardDomain"], 2)[1:])
    assert elsewhere["advertise"] == "atoll-core-2.shards.example.com:7070"


def test_shards_are_spread_and_called_by_their_names(rendered):
    answer = rendered["shards"]
    core = one(answer, "StatefulSet", "atoll-core")["spec"]
    assert core["replicas"] == 3
    (spread,) = core["template"]["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert one(answer, "PodDisruptionBudget", "atoll-core")["spec"]["maxUnavailable"] == 1
    assert (
        one(answer, "Service", "atoll-core")["spec"]["selector"]["statefulset.kubernetes.io/pod-name"] == "atoll-core-0"
    )
    assert one(answer, "Service", core["serviceName"])["spec"]["clusterIP"] == "None"
    hosts = one(answer, "Certificate", "atoll-core")["spec"]["dnsNames"]
    assert {"atoll-core", "*.atoll-core-pods.atoll.svc"} <= set(hosts)
    assert "--host '*.atoll-core-pods.atoll.svc'" in rendered["shards without cert-manager"]["notes"]
    for name in ("home", "everything"):
        assert not any(
            (each["kind"], each["metadata"]["name"]) == ("PodDisruptionBudget", "atoll-core")
            for each in rendered[name]["objects"]
        )


def test_the_secret_of_operators_is_mounted_where_the_core_looks(rendered):
    pod = pods(rendered["everything"])["core"]
    path = Path(parsed(_container(pod)["args"])["operator_tokens"])
    (mount,) = [each for each in _container(pod)["volumeMounts"] if each["mountPath"] == str(path.parent)]
    (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    assert volume["secret"] == {"secretName": "operators", "defaultMode": 0o440}
    assert path.name == "operator-tokens", "`atoll token` writes this file name"


def test_the_list_of_revoked_certificates_is_mounted_where_cores_and_fronts_look(rendered):
    for component in ("core", "front"):
        pod = pods(rendered["everything"])[component]
        path = Path(parsed(_container(pod)["args"])["revoked"])
        (mount,) = [each for each in _container(pod)["volumeMounts"] if each["mountPath"] == str(path.parent)]
        assert "subPath" not in mount, "Kubernetes does not update such a mount"
        (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
        assert volume["configMap"] == {"name": "revoked"}
        assert parsed(_container(pods(rendered["home"])[component])["args"])["revoked"] is None


def test_fronts_are_replaced_one_by_one_and_spread(rendered):
    front = one(rendered["home"], "Deployment", "atoll-front")["spec"]
    assert front["replicas"] == 2
    assert front["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    (spread,) = front["template"]["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    budget = one(rendered["home"], "PodDisruptionBudget", "atoll-front")["spec"]
    assert budget["maxUnavailable"] == 1
    for selector in (front["selector"], spread["labelSelector"], budget["selector"]):
        assert selector["matchLabels"].items() <= front["template"]["metadata"]["labels"].items()


def test_a_front_calls_its_releases_core_or_a_named_one(rendered):
    addresses = {name: parsed(_container(pods(rendered[name])["front"])["args"])["core"] for name in ("home", "remote")}
    assert addresses == {"home": "atoll-core:7070", "remote": "core.example.com:7070"}


def test_learners_call_the_nearest_address(rendered):
    called = {
        name: parsed(_container(pods(rendered[name])["learner"])["args"])["server"]
        for name in ("remote", "learners at the core", "learner alone")
    }
    assert [list(each) for each in called.values()] == [["atoll-front:7071"], ["atoll-core:7070"], ["a:7071", "b:7072"]]


def test_learners_are_named_by_their_region_and_get_what_trainers_need(rendered):
    learner = one(rendered["remote"], "StatefulSet", "atoll-learner")["spec"]
    assert (learner["replicas"], learner["podManagementPolicy"]) == (2, "Parallel")
    assert "--name" not in " ".join(_container(learner["template"]["spec"])["args"]), "the host name is the name"
    assert learner["template"]["spec"]["restartPolicy"] == "Always"


def test_a_users_own_script_replaces_the_reference_model(rendered):
    for value, field in {"args": "args", "command": "command"}.items():
        assert _container(pods(rendered[f"other learner.{value}"])["learner"])[field] == ["x"]
    own = _container(pods(rendered["other learner.image.repository"])["learner"])
    assert own["image"] == "x.example.com/x:0.1.0"
    assert "args" not in own, "the image has a command of its own"


def _dashboard(answer: dict) -> DashboardSettings:
    """Returns the settings with which the dashboard's container would run."""
    said = parsed(_container(pods(answer)["dashboard"])["args"])
    words = {name: said[name] for name in ("server", "listen", "plaintext")}
    return DashboardSettings(**words, hosts=said["host"] or (), insecure_plaintext=True)  # no certificates in tests


def test_a_dashboard_calls_its_releases_core_or_a_named_one(rendered):
    asked = {name: _dashboard(rendered[name]).server for name in ("home", "dashboard alone")}
    assert asked == {"home": "atoll-core:7070", "dashboard alone": "core.example.com:7070"}


def _status(settings: DashboardSettings, host: str) -> int:
    """Returns the dashboard's HTTP status for a request with this Host header."""

    said = []

    async def send(message):
        said.append(message)

    scope = {"type": "http", "method": "GET", "headers": [(b"host", host.encode())]}
    asyncio.run(Headers(PlainTextResponse("yes"), settings.names())(scope, None, send))
    return said[0]["status"]


def test_a_dashboard_answers_probes_and_by_its_own_names_only(rendered):
    """Another site's name may resolve to an address where `kubectl port-forward` listens."""
    for name in ("home", "everything"):
        container, settings = _container(pods(rendered[name])["dashboard"]), _dashboard(rendered[name])
        settings.check()
        assert {each for each in container if each.endswith("Probe")} == {
            "startupProbe", "readinessProbe", "livenessProbe",
        }  # fmt: skip
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/livez", "port": "http"}
        for host in ("10.0.0.7:7080", "[fd00::7]:7080"):  # a probe's Host header is the pod's address
            assert _status(settings, host) == 200
        for host in ("localhost:7080", "atoll-dashboard:7080", "atoll-dashboard.atoll.svc"):
            assert _status(settings, host) == 200
        assert _status(settings, "evil.example.com") == 421
    assert _status(_dashboard(rendered["everything"]), "atoll.example.com") == 200
    assert _status(_dashboard(rendered["other dashboard.hosts"]), "x") == 200
    assert _status(_dashboard(rendered["other dashboard.ingress.enabled"]), "atoll.example.com") == 421


def test_an_ingress_leads_to_the_dashboard(rendered):
    ingress = one(rendered["everything"], "Ingress", "atoll-dashboard")["spec"]
    (rule,) = ingress["rules"]
    (path,) = rule["http"]["paths"]
    assert ingress["tls"] == [{"hosts": [rule["host"]], "secretName": "atoll-page"}]
    assert rule["host"] == "atoll.example.com"
    called = path["backend"]["service"]
    (port,) = one(rendered["everything"], "Service", called["name"])["spec"]["ports"]
    assert (path["path"], called["port"]) == ("/", {"name": port["name"]})
    assert not any(each["kind"] == "Ingress" for each in rendered["home"]["objects"])


def test_images_come_from_the_configured_registry(rendered):
    name = "other image.registry"
    found = {part: _container(pod)["image"] for part, pod in pods(rendered[name]).items()}
    assert found == {part: f"registry.example.com/atoll-{part}:0.1.0" for part in PARTS}


@pytest.mark.parametrize("part", PARTS)
def test_a_component_may_have_its_own_image(rendered, part):
    def images(value: str) -> dict[str, str]:
        found = {name: _container(pod)["image"] for name, pod in pods(rendered[f"other {part}.image.{value}"]).items()}
        assert {name: image for name, image in found.items() if name != part} == {
            name: f"atoll-{name}:0.1.0" for name in PARTS if name != part
        }
        return found

    assert images("repository")[part] == "x.example.com/x:0.1.0"
    assert images("tag")[part] == f"atoll-{part}:x"
    assert images("digest")[part] == f"atoll-{part}@{DIGEST}", "a digest takes precedence over a tag"


@pytest.mark.parametrize("part", PARTS)
def test_users_can_add_labels_variables_and_volumes(rendered, part):
    def template(value: str) -> dict:
        kind = "StatefulSet" if part in {"core", "learner"} else "Deployment"
        return one(rendered[f"other {part}.{value}"], kind, f"atoll-{part}")["spec"]["template"]

    assert template("podLabels")["metadata"]["labels"]["x"] == "y"
    assert template("podLabels")["metadata"]["labels"]["app.kubernetes.io/component"] == part
    assert template("priorityClassName")["spec"]["priorityClassName"] == "x"
    assert {"name": "X", "value": "x"} in _container(template("extraEnv")["spec"])["env"]
    assert {"name": "x", "emptyDir": {}} in template("extraVolumes")["spec"]["volumes"]
    mounts = _container(template("extraVolumeMounts")["spec"])["volumeMounts"]
    assert {"name": "x", "mountPath": "/x"} in mounts


def test_cert_manager_makes_valid_atoll_certificates(rendered):
    everything = rendered["everything"]
    uses = {"core": ["server auth", "client auth"], "front": ["server auth", "client auth"]}
    roles = {"dashboard": Role.VIEWER.value}
    for part, pod in pods(everything).items():
        made = one(everything, "Certificate", f"atoll-{part}")["spec"]
        (uri,) = made["uris"]
        role, _, name = uri.removeprefix("atoll://").partition("/")
        assert role == roles.get(part, part)
        assert NAME.fullmatch(name.removesuffix(ANY))
        assert made["usages"] == ["digital signature", *uses.get(part, ["client auth"])]
        assert ("dnsNames" in made) == (part in uses), "a component that only calls needs no DNS names"
        assert made["privateKey"]["algorithm"] == "ECDSA"
        (secret,) = [each["secret"] for each in pod["volumes"] if each["name"] == "tls"]
        assert secret["secretName"] == made["secretName"]
        files = {item["key"]: item["path"] for item in secret["items"]}
        assert files == {"ca.crt": "ca.pem", "tls.crt": "cert.pem", "tls.key": "key.pem"}
    core = one(everything, "Certificate", "atoll-core")["spec"]
    assert {"atoll-core", "localhost", "core.example.com"} <= set(core["dnsNames"])
    assert core["ipAddresses"] == ["192.0.2.7"]
    (learners,) = one(everything, "Certificate", "atoll-learner")["spec"]["uris"]
    assert allows_name(learners, f"atoll://learner/{own_name('eu')}")
