"""Renders the chart with Helm's own engine and validates the result, without a cluster or helm binary.

Runs on Python 3.12 or newer with requirements.txt, and imports nothing from Atoll. Standard input: a JSON list of
`{"name": ..., "values": [a path or an object, ...]}`. Later values override earlier ones. Standard output: JSON,
`{name: {"error", "manifest", "notes", "objects", "invalid"}}`. The objects include the pods of `helm test`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import helm_sdkpy
import kubernetes_validate
import yaml

RELEASE, NAMESPACE = "atoll", "atoll"
KUBERNETES = "1.34", "1.27"  # the newest supported version, and the oldest that Chart.yaml allows
AT_A_TIME = 16  # threads, because an installation mostly waits for replies
KINDS = {
    "v1": "services:Service serviceaccounts:ServiceAccount secrets:Secret configmaps:ConfigMap "
    "persistentvolumeclaims:PersistentVolumeClaim",
    "apps/v1": "deployments:Deployment statefulsets:StatefulSet",
    "networking.k8s.io/v1": "networkpolicies:NetworkPolicy ingresses:Ingress",
    "policy/v1": "poddisruptionbudgets:PodDisruptionBudget",
    "monitoring.coreos.com/v1": "podmonitors:PodMonitor prometheusrules:PrometheusRule",
    "cert-manager.io/v1": "certificates:Certificate",
}
RESOURCES = {group: dict(pair.split(":") for pair in pairs.split()) for group, pairs in KINDS.items()}
BUILT_IN = {
    "v1",
    "apps/v1",
    "networking.k8s.io/v1",
    "policy/v1",
}  # other kinds come with operators, and have no schema here
PATH = re.compile(r"/(?:api|apis)/((?:[^/]+/)?v[^/]+)(?:/(?:namespaces/[^/]+/)?([^/]+)(?:/([^/]+))?)?")


class StubApi(BaseHTTPRequestHandler):
    """The part of a Kubernetes API that an installation needs: the list of kinds, and successful answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body, which is sent after the header, would wait 40 ms

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""

    def handle_any(self) -> None:
        """Answers one request."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        status, answer = self._answer(path, body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if path == "/version":
            return 200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return 200, {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [_group(g) for g in RESOURCES if "/" in g],
            }
        match = PATH.fullmatch(path)
        if match is None or match[1] not in RESOURCES:
            return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        group, resource, name = match.groups()
        if resource is None:
            kinds = [_resource(each, kind) for each, kind in RESOURCES[group].items()]
            return 200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": kinds}
        kind = RESOURCES[group].get(resource, "Unknown")
        if self.command == "GET" and name is None:
            return 200, {"kind": f"{kind}List", "apiVersion": group, "metadata": {}, "items": []}
        if self.command == "GET":
            return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        # Built-in kinds may arrive as protobuf. Helm does not use the answer's content.
        made = {"metadata": {"name": name or "it"}} if body[:4] == b"k8s\0" else json.loads(body)
        made["metadata"] |= {"uid": "u", "resourceVersion": "1", "namespace": NAMESPACE}
        return 201, {"kind": kind, "apiVersion": group} | made

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any


class Server(ThreadingHTTPServer):
    """An HTTP server with a longer backlog. With the default of five, some connections would be reset."""

    request_queue_size = 1024


def _group(group: str) -> dict[str, Any]:
    name, version = group.split("/")
    versions = {"groupVersion": group, "version": version}
    return {"name": name, "versions": [versions], "preferredVersion": versions}


def _resource(name: str, kind: str) -> dict[str, Any]:
    verbs = ["create", "get", "list", "patch", "update", "delete", "watch"]
    return {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}


def merged(parts: list[str | dict[str, Any]]) -> dict[str, Any]:
    """Merges values like `helm --values` with several files."""
    values: dict[str, Any] = {}

    def merge(into: dict[str, Any], other: dict[str, Any]) -> None:
        for key, value in other.items():
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                merge(into[key], value)
            else:
                into[key] = value

    for part in parts:
        merge(values, yaml.safe_load(Path(part).read_text()) if isinstance(part, str) else part)
    return values


def rendered(chart: str, kubeconfig: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the objects that an installation with these values makes, or its error."""
    try:
        # A new one each time, because it holds the driver that keeps releases in memory.
        client = helm_sdkpy.Configuration(namespace=NAMESPACE, kubeconfig=kubeconfig)
        release = asyncio.run(helm_sdkpy.Install(client).run(RELEASE, chart, values=values, wait=False))
    except helm_sdkpy.HelmError as error:
        return {"error": str(error), "manifest": "", "notes": "", "objects": [], "invalid": []}
    texts = [release["manifest"], *(each["manifest"] for each in release.get("hooks", ()))]
    objects = [each for text in texts for each in yaml.load_all(text, yaml.CSafeLoader) if each is not None]
    return {
        "error": "", "manifest": release["manifest"], "notes": release["info"].get("notes", ""), "objects": objects,
        "invalid": [complaint for each in objects for complaint in complaints(json.dumps(each))],
    }  # fmt: skip


@functools.cache  # cached, because most objects are equal for most values
def complaints(text: str) -> list[str]:
    """Returns the errors that Kubernetes would find in an object, including unknown names."""
    found, thing = [], json.loads(text)
    for version in KUBERNETES if thing["apiVersion"] in BUILT_IN else ():
        try:
            kubernetes_validate.validate(thing, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{version}: {thing['kind']} {thing['metadata']['name']}: {error}")
    return found


def main() -> None:
    """Answers the requests on standard input."""
    chart, asked = sys.argv[1], json.load(sys.stdin)
    server = Server(("127.0.0.1", 0), StubApi)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "stub", "users": [{"name": "stub", "user": {}}],
        "clusters": [{"name": "stub", "cluster": {"server": address}}],
        "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "stub", "namespace": NAMESPACE}}],
    }  # fmt: skip
    os.environ["HELM_DRIVER"] = "memory"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as kubeconfig, tempfile.TemporaryDirectory() as folder:
        json.dump(config, kubeconfig)  # JSON is valid YAML
        kubeconfig.flush()
        packing = helm_sdkpy.Package(helm_sdkpy.Configuration(namespace=NAMESPACE, kubeconfig=kubeconfig.name))
        package = asyncio.run(packing.run(chart, folder))  # links are replaced by their targets in the copy
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            values = [merged(each["values"]) for each in asked]
            answers = pool.map(functools.partial(rendered, package, kubeconfig.name), values)
            by_name = {each["name"]: answer for each, answer in zip(asked, answers, strict=True)}
    json.dump(by_name, sys.stdout)


if __name__ == "__main__":
    main()
