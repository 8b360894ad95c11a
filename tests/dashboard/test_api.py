"""The JSON API with a real core: it matches the core, actions need a token, and it reports an unreachable core."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import struct
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from atoll_dashboard.models import conversion
from atoll_dashboard.models.api_models import Learner
from atoll_dashboard.web.read_routes import in_order
from atoll_dashboard.web.runbooks import render
from atoll_wire import outer_pb2 as pb

from tests.dashboard.house import LEARNERS, House, house
from tests.end_to_end.world import eventually

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "docker/prometheus/rules.yaml"


@pytest.fixture(scope="module")
def lived_in(tmp_path_factory):
    with house(tmp_path_factory.mktemp("house")) as it:
        eventually(lambda: it.look("run")["contributions"]["merged"] > 30, 60)
        eventually(lambda: it.look("run")["tokens_per_s"])
        yield it


def test_the_run_is_reported_as_the_core_reports_it(lived_in: House):
    with lived_in.core.security.dial_and_wait(lived_in.core.address) as channel:
        from atoll_wire import outer_pb2_grpc as rpc

        shown = (("authorization", f"Bearer {lived_in.token}"),)
        before = rpc.OperatorStub(channel).Status(pb.StatusRequest(), metadata=shown)
        run = lived_in.look("run")
        after = rpc.OperatorStub(channel).Status(pb.StatusRequest(), metadata=shown)
    assert (run["run"], run["parameters"], run["fragments"], run["codec"]) == (before.run, 2896, 4, "int4")
    assert run["tokens_trained"] <= after.tokens_trained
    assert run["reachable"]
    assert run["problem"] == ""
    assert run["age_s"] < 5
    assert run["actions"]
    assert run["datasets"] == []
    assert run["learners"] == {"live": 3, "paused": 0, "joining": 0, "silent": 0, "cut_off": 0, "left": 0, "evicted": 0}
    assert run["cost"]["budget_gb"] == 100
    wire = run["wire"]
    total = wire["up_bytes"] + wire["down_bytes"] + wire["whole_bytes"]
    assert run["cost"]["total"] == pytest.approx(0.09e-9 * total)
    assert 2 < wire["up_bits"] < 8


def test_counts_of_data_units_are_reported_as_the_core_reports_them():
    told = pb.DatasetStatus(
        name="d", units=9, epochs=2, epoch=1, consumed=8, leased=3, returned=2, repeated=0.5, lost=0.25
    )
    assert conversion.units(told).model_dump() == {
        "name": "d", "units": 9, "epochs": 2, "epoch": 1, "consumed": 8, "leased": 3, "returned": 2, "repeated": 0.5,
        "lost": 0.25,
    }  # fmt: skip


def test_a_learner_without_a_loss_comes_last_in_both_orders():
    losses = {"none": None, "high": 3.0, "low": 1.0}
    learners = [Learner.model_construct(learner=name, loss=loss) for name, loss in losses.items()]
    for descending, expected in ((False, ["low", "high", "none"]), (True, ["high", "low", "none"])):
        assert [each.learner for each in in_order(learners, "loss", descending=descending)] == expected


def test_regions_learners_and_fragments(lived_in: House):
    regions = {each["region"]: each for each in lived_in.look("regions")}
    assert {name: each["learners"]["live"] for name, each in regions.items()} == {"eu": 2, "us": 1}
    assert [dot["learner"] for dot in regions["eu"]["dots"]] == ["eu-1", "eu-2"]
    assert [(link["name"], link["front"]) for link in regions["eu"]["links"]] == [("eu-1", False), ("eu-2", False)]
    page = lived_in.look("learners?sort=steps&descending=true&limit=2")
    assert (page["total"], len(page["items"])) == (3, 2)
    steps = [each["steps"] for each in lived_in.look("learners?sort=steps")["items"]]
    assert steps == sorted(steps)
    assert [each["learner"] for each in lived_in.look("learners?region=us")["items"]] == ["us-1"]
    assert [each["learner"] for each in lived_in.look("learners?search=EU-2")["items"]] == ["eu-2"]
    assert lived_in.look("learners?state=silent") == {"total": 0, "offset": 0, "items": []}
    one = lived_in.look("learners/eu-1")
    assert one["loss"] > 0
    assert one["region"] == "eu"
    assert lived_in.ask("learners/absent") == (
        404,
        {"detail": 'this run has no learner "absent": `atoll status` lists its learners'},
    )
    fragments = lived_in.look("fragments?limit=3")
    assert fragments["total"] == 4
    assert sum(each["parameters"] for each in lived_in.look("fragments")["items"]) == 2896
    assert all(each["version"] > 0 and each["published_age_s"] >= 0 for each in fragments["items"])
    assert lived_in.ask("learners?sort=nonsense")[0] == 422
    assert lived_in.ask("learners?limit=100000")[0] == 422


def test_rounds_receipts_and_events(lived_in: House):
    rounds = [each for each in lived_in.look("rounds?last=20") if each["outcome"] == "merged"]
    assert rounds
    for each in rounds:
        assert each["opened_at"] <= each["closed_at"] <= each["merged_at"] <= each["published_at"]
        assert {answer["learner"] for answer in each["answers"]} <= {name for name, *_ in LEARNERS}
    mine = lived_in.look("rounds?last=5&learner=us-1")
    assert all([answer["learner"] for answer in each["answers"]] == ["us-1"] for each in mine)
    first = lived_in.look("receipts?limit=5")
    second = lived_in.look(f"receipts?limit=5&before={first['before']}")
    numbers = [each["number"] for each in first["items"] + second["items"]]
    assert numbers == sorted(numbers, reverse=True)
    assert len(set(numbers)) == 10
    assert {each["learner"] for each in lived_in.look("receipts?learner=eu-1&fate=merged")["items"]} == {"eu-1"}
    events = lived_in.look("events")
    assert {("joined", "eu-1"), ("joined", "us-1"), ("core", "")} <= {(e["kind"], e["learner"]) for e in events}
    assert lived_in.look(f"events?after={events[0]['number']}") == []


def test_the_stream_sends_the_state_every_second(lived_in: House):
    with urllib.request.urlopen(f"{lived_in.url}/api/live", timeout=20) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = (line.decode() for line in stream)
        told = []
        for line in _some(lines, 15):
            told.append(json.loads(line.removeprefix("data: ")))
            if len(told) >= 3 and told[0]["run"]["tokens_trained"] < told[-1]["run"]["tokens_trained"]:
                break
    assert {each["run"]["run"] for each in told} == {lived_in.look("run")["run"]}
    assert told[0]["run"]["tokens_trained"] < told[-1]["run"]["tokens_trained"]
    assert {each["region"] for each in told[-1]["regions"]} == {"eu", "us"}
    assert all(each["outcome"] in {"open", "merging"} for now in told for each in now["rounds"])
    assert all(each["answers"] == [] for now in told for each in now["rounds"]), "answers have their own path"
    history = lived_in.look("history")
    assert all(start < end for start, end in history["gaps"])
    assert history["now"] >= history["at"][-1]
    columns = [column for name, column in history.items() if name not in {"gaps", "now"}]
    assert len({len(column) for column in columns}) == 1
    assert any(value is not None for value in history["loss"])
    assert len(lived_in.look("learners/eu-1/history")["at"]) > 0


def _some(lines, count: int):
    for line in lines:
        if line.startswith("data: "):
            yield line
            count -= 1
            if not count:
                return


def test_actions_need_an_operators_token_and_the_core_records_the_operator(lived_in: House):
    for token in ("", "nonsense", "ä"):
        status, told = lived_in.action("evict", token=token.encode().decode("latin-1"), learner="eu-2", reason="no")
        assert status == 401, told
        assert "token" in told["detail"]
    assert lived_in.look("learners/eu-2")["state"] == "live"
    status, told = lived_in.action("evict", learner="absent")
    assert (status, told["detail"]) == (404, 'this run has no learner "absent": `atoll status` lists its learners')
    assert lived_in.action("evict", learner="eu-2", reason="night") == (200, {"said": "eu-2 was evicted"})
    lived_in.trainees["eu-2"].join(20)
    assert "was evicted (night)" in str(lived_in.trainees["eu-2"].error)
    eventually(lambda: lived_in.look("learners/eu-2")["state"] == "evicted")
    assert lived_in.action("readmit", learner="eu-2") == (200, {"said": "eu-2 may join again"})
    lived_in.learn("eu-2", "eu", 0.03)
    eventually(lambda: lived_in.look("learners/eu-2")["state"] == "live", 30)
    status, told = lived_in.action("checkpoint")
    assert status == 200, told
    assert lived_in.look("checkpoints")[0]["merges"] > 0
    assert lived_in.action("pause", reason="night")[0] == 200
    eventually(lambda: lived_in.look("run")["paused"] == "by ann: night")
    assert lived_in.action("resume") == (200, {"said": "the run was resumed"})
    eventually(lambda: lived_in.look("run")["paused"] == "")
    actions = [json.loads(line) for line in (lived_in.core.directory / "audit.jsonl").read_text().splitlines()]
    assert [(each["act"], each["operator"]) for each in actions if each["act"] in {"evict", "pause", "resume"}] == [
        ("evict", "ann"), ("evict", "ann"), ("pause", "ann"), ("resume", "ann"),
    ]  # fmt: skip


def test_a_ticket_for_the_model_needs_a_token_and_works_once(lived_in: House):
    assert lived_in.action("download-ticket", token="")[0] == 401
    url = lived_in.action("download-ticket")[1]["url"]
    with urllib.request.urlopen(f"{lived_in.url}/{url}", timeout=20) as answer:
        model = answer.read()
        assert "attachment" in answer.headers["content-disposition"]
    (size,) = struct.unpack("<Q", model[:8])
    header = json.loads(model[8 : 8 + size])
    assert header["0.weight"]["shape"] == [32, 16]
    assert lived_in.ask(url.removeprefix("api/"))[0] == 403, "a ticket must work only once"
    assert lived_in.action("download-ticket", token="nonsense")[0] == 401, "the core must check the token"
    statuses = [lived_in.action("download-ticket")[0] for _ in range(7)]
    assert statuses == [200] * 5 + [503] * 2, "tickets must have a limit per caller"


def test_other_host_names_are_refused_and_security_headers_are_sent(lived_in: House):
    request = urllib.request.Request(f"{lived_in.url}/api/run", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    assert refused.value.code == 421
    with urllib.request.urlopen(f"{lived_in.url}/", timeout=20) as answer:
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    with urllib.request.urlopen(f"{lived_in.url}/api/openapi.json", timeout=20) as answer:
        paths = json.loads(answer.read())["paths"]
    assert {"/api/run", "/api/receipts", "/api/actions/evict"} <= set(paths)


def test_the_runbook_url_of_every_alert_opens_its_section(lived_in: House):
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert len(alerts) > 15
    for alert in alerts:
        url = urllib.parse.urlsplit(alert["annotations"]["runbook_url"])
        with urllib.request.urlopen(f"{lived_in.url}{url.path}", timeout=20) as answer:
            page = answer.read().decode()
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert f'<h2 id="{url.fragment}">{alert["alert"]}</h2>' in page
        assert f'<a href="#{url.fragment}">' in page, "the list of alerts must link to it"
    for name in re.findall(r'(?:href|src)="(page/[^"]+)"', page):
        with urllib.request.urlopen(f"{lived_in.url}/{name}", timeout=20) as answer:
            assert answer.status == 200
    assert not re.search(r'href="(?!#|page/|\./"|https?:)', page), "links must lead to served files"


def test_compose_and_the_chart_publish_the_dashboard_at_the_port_of_runbook_urls():
    environment = (ROOT / "docker/.env").read_text()
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["dashboard"]
    assert "DASHBOARD_PORT=7080\n" in environment
    assert compose["ports"] == ["127.0.0.1:${DASHBOARD_PORT}:7080"]
    assert compose["command"][-2:] == ["--host", "localhost"]
    history = compose["command"][compose["command"].index("--history") + 1]
    assert f"history:{Path(history).parent}" in compose["volumes"], "a new container must find the history"
    assert "port-forward service/{{ $fullname }}-dashboard 7080" in (ROOT / "k8s/atoll/templates/NOTES.txt").read_text()


def test_runbooks_are_rendered_without_raw_html_tabs_or_comments():
    title, contents, body = render(
        "# Runbooks\n\n## AtollX\n\n<!-- not run: a cluster -->\n"
        '=== "Docker"\n\n    ```bash\n    atoll status\n    ```\n\n'
        "See [backups](backups.md#a), [here](#atollx) and <b>b</b>.\n"
    )
    assert title == "Runbooks"
    assert contents == '<li><a href="#atollx">AtollX</a></li>'
    assert body.splitlines() == [
        '<h2 id="atollx">AtollX</h2>',
        "<p><strong>Docker</strong></p>",
        '<pre><code class="language-bash">atoll status',
        "</code></pre>",
        '<p>See backups (docs/operate/backups.md), <a href="#atollx">here</a> and &lt;b&gt;b&lt;/b&gt;.</p>',
    ]


def test_a_request_larger_than_any_action_is_not_read(lived_in: House):
    status, _ = _raw(
        lived_in,
        b"POST /api/actions/pause HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"4000\r\n" + bytes(0x4000) + b"\r\n4000\r\n" + bytes(0x4000) + b"\r\n",
    )
    assert status == 413
    assert lived_in.ask(f"receipts?before={1 << 80}")[0] == 422


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body must be a JSON object"),
        (b"[]", "the body must be a JSON object"),
        (b"{}", "learner: field required"),
        (b'{"learner": 1}', "learner: input should be a valid string"),
    ],
)
def test_a_wrong_body_is_explained(lived_in: House, body: bytes, said: str):
    headers = {"Content-Type": "application/json", "x-atoll-token": "any"}
    request = urllib.request.Request(f"{lived_in.url}/api/actions/evict", body, headers, method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    assert refused.value.code == 422
    assert json.load(refused.value)["detail"].startswith(said)


def _raw(it: House, request: bytes) -> tuple[int, bytes]:
    host, _, port = it.url.removeprefix("http://").partition(":")
    with contextlib.closing(socket.create_connection((host, int(port)), 20)) as connection:
        connection.sendall(request)
        answer = connection.recv(4096)
    return int(answer.split()[1]), answer


def test_a_frozen_core_is_reported_within_seconds(lived_in: House):
    """The core is stopped: its connection stays open, but it does not answer."""
    it = lived_in
    it.core.child.process.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: not it.look("run")["reachable"], 15)
        with urllib.request.urlopen(f"{it.url}/api/live", timeout=20) as stream:
            began = time.monotonic()
            told = [json.loads(line.removeprefix("data: ")) for line in _some((x.decode() for x in stream), 4)]
        assert time.monotonic() - began < 10, "the stream must continue"
        assert told[3]["run"]["age_s"] > told[0]["run"]["age_s"] + 1
    finally:
        it.core.child.process.send_signal(signal.SIGCONT)
    eventually(lambda: it.look("run")["reachable"], 15)


def test_closed_streams_are_released(lived_in: House):
    host, _, port = lived_in.url.removeprefix("http://").partition(":")
    for _ in range(300):  # more than the limit of open calls
        with contextlib.closing(socket.create_connection((host, int(port)))) as connection:
            connection.sendall(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(64).startswith(b"HTTP/1.1 200")


def test_a_dead_core_is_reported_and_a_restarted_one_is_shown_again(lived_in: House):
    it = lived_in
    before, events = it.look("run"), it.look("events")
    it.core.kill()
    eventually(lambda: not it.look("run")["reachable"])
    away = it.look("run")
    assert away["problem"].startswith(f"no core answers at {it.core.address}")
    assert away["tokens_trained"] >= before["tokens_trained"], "the last values must stay"
    eventually(lambda: it.look("run")["age_s"] > 2)
    status, told = it.ask("receipts")
    assert (status, told["detail"]) == (503, away["problem"])
    assert it.action("pause", reason="x")[0] == 503
    it.core.start()
    epoch = before["epoch"] + 1
    eventually(lambda: it.look("run")["reachable"] and it.look("run")["epoch"] == epoch)
    eventually(lambda: it.look("run")["learners"]["live"] == 3, 40)
    after = it.look("events")
    assert next(each["text"] for each in after if each["kind"] == "core") == f"the core started: epoch {epoch}"
    assert [each["number"] for each in after][-len(events) :] == [each["number"] for each in events], "events must stay"


def test_without_tokens_actions_are_off_and_the_page_states_the_fix(tmp_path):
    from atoll.demo.processes import children

    from tests.end_to_end.world import Core

    with children(tmp_path) as group:
        core = Core(group, tmp_path / "run", [])
        dashboard, url = group.start_dashboard("127.0.0.1:0", core.address)
        it = House(core, group, "", url, dashboard)
        eventually(lambda: it.look("run")["reachable"])
        run = it.look("run")
        assert not run["actions"]
        assert "--operator-tokens" in run["actions_problem"]
        assert it.action("pause", token="x", reason="x") == (409, {"detail": run["actions_problem"]})
        group.stop(dashboard)
        assert dashboard.process.returncode == 0


def test_an_invalid_address_is_refused_in_one_line(tmp_path):
    from tests.end_to_end.test_operators import atoll

    for options, said in (
        (["--listen", "0.0.0.0:0"], "error: --listen 0.0.0.0:0 is not loopback: put a proxy with TLS in front of it"),
        (["--listen", "127.0.0.1:99999"], "error: --listen 127.0.0.1:99999 cannot be bound"),
        (["--server", "core.example.com:7070"], "error: core.example.com:7070 is not loopback: give --tls DIR"),
        (["--tls", str(tmp_path)], f"error: --tls {tmp_path}: ca.pem cannot be read"),
    ):
        done = atoll("dashboard", *options)
        assert done.returncode == 1
        assert done.stderr.startswith(said), done.stderr
