"""Prometheus of a region sends its series to a Prometheus elsewhere, which accepts only callers with a certificate."""

from __future__ import annotations

import json
import ssl
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from atoll.demo.processes import Children, DemoError, children, free_port
from atoll_server.access.certificate_authority import init, issue
from atoll_wire.security.certificate import Role

from tests.end_to_end.world import eventually
from tests.observing.promql import promtool

pytestmark = [pytest.mark.observe, pytest.mark.timeout(120)]
HERE = Path(__file__).parent.parent.parent / "docker/prometheus"


class Front(BaseHTTPRequestHandler):
    """Answers like the metrics port of a front."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'atoll_front_core_up{region="eu"} 1\n')

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def front() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Front)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def _certificates(authority: Path) -> dict[str, Path]:
    """Issues the certificates as docs/operate/monitoring.md does."""
    init(authority)
    return {
        "home": issue(authority, Role.CORE, "metrics", ["localhost"], 1.0),
        "region": issue(authority, Role.READER, "eu", [], 1.0),
    }


def _start(group: Children, folder: Path, name: str, *words: str) -> int:
    port = free_port()
    where = [f"--config.file={folder}/prometheus.yaml", f"--web.listen-address=127.0.0.1:{port}", *words]
    try:
        group.start(name, ["prometheus", *where])
    except DemoError as error:
        pytest.fail(f"{error}: install Prometheus (apt-get install prometheus)", pytrace=False)
    return port


def test_a_regions_series_arrive_and_a_stranger_is_refused(tmp_path, front):
    made = _certificates(tmp_path / "authority")
    for name in ("home", "region"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tls").symlink_to(made[name])
    (tmp_path / "home/web.yaml").write_text((HERE / "receiver.yaml").read_text())
    (tmp_path / "home/prometheus.yaml").write_text("scrape_configs: []\n")
    with children(tmp_path) as group:
        web = ["--web.enable-remote-write-receiver", f"--web.config.file={tmp_path}/home/web.yaml"]
        home = _start(group, tmp_path / "home", "home", f"--storage.tsdb.path={tmp_path}/home/series", *web)
        text = (HERE / "region.yaml").read_text()
        for old, new in {"metrics.example.com:9090": f"localhost:{home}", "front-eu:9100": front, "15s": "1s"}.items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "region/prometheus.yaml").write_text(text)
        agent = ["--enable-feature=agent", f"--storage.agent.path={tmp_path}/region/series"]  # --agent since version 3
        _start(group, tmp_path / "region", "region", *agent)

        def ask(expression: str, context: ssl.SSLContext) -> list[dict[str, str]]:
            url = f"https://localhost:{home}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
            with urllib.request.urlopen(url, timeout=20, context=context) as answer:
                return [each["metric"] for each in json.loads(answer.read())["data"]["result"]]

        stranger = ssl.create_default_context(cafile=str(made["region"] / "ca.pem"))
        person = ssl.create_default_context(cafile=str(made["region"] / "ca.pem"))
        person.load_cert_chain(made["region"] / "cert.pem", made["region"] / "key.pem")

        def arrived() -> list[dict[str, str]]:
            try:
                return ask('atoll_front_core_up{job="atoll-front"}', person)
            except OSError:
                return []  # Prometheus is still starting

        eventually(arrived, 60)
        (found,) = arrived()
        assert (found["run"], found["region"], found["instance"]) == ("demo", "eu", front)
        assert {each["job"] for each in ask("up", person)} == {"atoll-front", "atoll-learner"}, "for the alerts"
        with pytest.raises(OSError, match=r"(?i)certificate"):
            ask("up", stranger)


def test_prometheus_accepts_the_shipped_files(tmp_path):
    (tmp_path / "tls").symlink_to(_certificates(tmp_path / "authority")["home"])
    for name in ("region.yaml", "receiver.yaml"):
        (tmp_path / name).write_text((HERE / name).read_text())
    assert "SUCCESS" in promtool("check", "config", str(tmp_path / "region.yaml"))
    promtool("check", "web-config", str(tmp_path / "receiver.yaml"))
