"""The core as a process: its services, modules that it must not load, and its end."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from benchmarks.process_state import Metrics, metrics
from tests.end_to_end.world import Trainee, core, eventually, train

ATOLL = [sys.executable, "-m", "atoll.cli"]


def test_the_cores_process_never_loads_torch_nor_the_learners_package(tmp_path):
    with core(tmp_path) as running:
        train(running.address, "a", steps=40)
        maps = Path(f"/proc/{running.child.process.pid}/maps").read_text()
        assert "numpy" in maps
        assert "torch" not in maps
    code = """
import sys, runpy
for name in ("torch", "atoll.learner", "atoll", "psutil"):
    sys.modules[name] = None  # importing it raises
sys.argv = ["atoll_server", "core", "--dir", DIR, "--listen", "nowhere:0"]
runpy.run_module("atoll_server", run_name="__main__")
""".replace("DIR", repr(str(tmp_path / "other")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: nowhere:0 is not loopback: give --tls DIR")


def test_a_core_that_compiles_nothing_does_not_log_it(tmp_path):
    with core(tmp_path) as running:
        first = running.log()
        running.kill()
        running.start()
        assert "compiling kernels" not in running.log().removeprefix(first)


def test_health_and_reflection_answer(tmp_path):
    with core(tmp_path) as running, grpc.insecure_channel(running.address) as channel:
        for service in ("", "atoll.v1.Outer", "atoll.v1.Operator"):
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=10
            )
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        listed = next(iter(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))))
        assert "atoll.v1.Outer" in {service.name for service in listed.list_services_response.service}


def test_core_and_learner_serve_prometheus_text(tmp_path, unused_port):
    def probes(port: str | int) -> list[str]:
        asked = (f"http://127.0.0.1:{port}/{path}" for path in ("livez", "readyz"))
        return [urllib.request.urlopen(url, timeout=20).read().decode() for url in asked]

    found = list[Metrics]()

    def enough(trainee: Trainee) -> bool:
        if len(trainee.losses) >= 80:
            found.append(metrics(unused_port))
            assert probes(unused_port) == ["yes\n", "yes\n"]
        return bool(found)

    with core(tmp_path, "--metrics-listen", "127.0.0.1:0", "--log-json") as running:
        trainee = Trainee(running.address, "a", enough, metrics_listen=f"127.0.0.1:{unused_port}", region="eu")
        trainee.start()
        trainee.done()
        port = int(running.log().split('"metrics_port": ')[1].split(",")[0])
        assert probes(port) == ["yes\n", "yes\n"]
        eventually(lambda: running.status().contributions.pending == 0)
        eventually(lambda: metrics(port).total("atoll_learners", state="left") == 1)
        read, status = metrics(port), running.status()
    assert read.total("atoll_contributions_total", fate="merged") == status.contributions.merged
    assert read.total("atoll_learner_inner_steps_total", learner="a") == 80
    assert read.total("atoll_goodput_ratio") == pytest.approx(status.goodput.ratio, abs=0.02)
    lost_s = status.goodput.provisioned_s - status.goodput.useful_s
    assert read.total("atoll_lost_seconds") == pytest.approx(lost_s, abs=0.3)
    assert read.total("atoll_wan_bytes_total", direction="up", region="eu") > 0
    assert read.total("atoll_fragment_version", fragment="0") > 0
    assert list(read.samples("atoll_spool_bytes"))
    assert found[0].total("atoll_local_inner_steps_total", learner="a") == 80
    with pytest.raises(urllib.error.URLError):  # a learner closes its port when it leaves
        metrics(unused_port)


def test_the_status_command_shows_the_run_and_its_json_is_the_message(tmp_path):
    with core(tmp_path) as running:
        train(running.address, "eu-west", steps=30)
        shown = subprocess.run([*ATOLL, "status", "--server", running.address], capture_output=True, text=True)
        as_json = subprocess.run(
            [*ATOLL, "status", "--json", "--server", running.address], capture_output=True, text=True
        )
    assert shown.returncode == 0, shown.stderr
    assert "goodput" in shown.stdout
    found = json.loads(as_json.stdout)
    assert found["learners"][0]["learner"] == "eu-west"
    assert found["tokens_trained"] >= 30, "64-bit integers are numbers"
    assert (found["paused"], found["restored"], found["settings"]["codec"]) == ("", None, "int4")


CORE = ["core", "--dir", "DIR", "--listen", "127.0.0.1:0"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["core", "--dir", "DIR", "--listen", "0.0.0.0:0"], 1, "error: 0.0.0.0:0 is not loopback"),
        (["core", "--dir", "/proc/nothing"], 1, "error: --dir /proc/nothing cannot be used"),
        ([*CORE, "--init", "/nothing"], 1, "error: --init /nothing cannot be read"),
        ([*CORE, "--init", "."], 1, "error: . has neither model.safetensors.index.json nor model.safetensors: give a safetensors file, or"),
        ([*CORE, "--init", "/dev/null"], 1, "error: --init /dev/null cannot be read"),
        ([*CORE, "--quorum", "most"], 2, 'error: quorum "most" is neither'),
        ([*CORE, "--outer-lr", "-1"], 2, "error: --outer-lr -1: input should be greater than 0"),
        ([*CORE, "--codec", "int5"], 2, "error: --codec int5: give float32, int8, int4"),
        ([*CORE, "--keep-snapshots", "1"], 2, "error: --keep-snapshots 1: input should be"),
        ([*CORE, "--log-level", "loud"], 2, "error: --log-level loud is not a log level: use one of"),
        (["core"], 2, "Missing option '--dir'"),
        (["core", "--dir", "DIR", "--whatever"], 2, "No such option: --whatever"),
        (["status", "--server", "127.0.0.1:1"], 3, "error: no core answers at 127.0.0.1:1"),
        (["status", "--server", "127.0.0.1:1"], 3, "start one there with `atoll core --listen 127.0.0.1:1 --dir DIR`"),
        (["status", "--server", "nowhere.invalid:1", "--insecure-plaintext"], 3, "check that the core runs and that the"),
        (["checkpoint", "export", "out", "--dir", "DIR"], 1, "holds no run"),
        (["checkpoint", "export", "out", "--max-file-size", "5 apples"], 2, "5 apples is not a size: give bytes, or KiB, MiB"),
        (["checkpoint", "export", "out", "--max-file-size", "1000"], 2, "error: --max-file-size 1000: at least 1MiB is needed"),
        (["checkpoint", "export", "/proc", "--max-file-size", "5GiB"], 1, "error: /proc contains files that are not part of an export"),
        (["learner", "--name", "a", "--size", "huge"], 2, "error: --size huge: input should be 'tiny', '25m' or '124m'"),
        (["learner", "--name", "a", "--adoption", "x"], 2, "error: --adoption x: input should be 'rebase' or 'overwrite'"),
        (["learner", "--name", "a", "--connect-timeout-s", "0.1", "--server", "127.0.0.1:1"], 3, "error: could not join the run at 127.0.0.1:1"),
        (["demo", "--data", "/nothing"], 1, "error: --data /nothing cannot be read"),
        (["demo", "--json", "/nothing/out.json"], 1, "error: --json /nothing/out.json cannot be written"),
        (["nonsense"], 2, "No such command 'nonsense'"),
    ],
)  # fmt: skip
def test_a_users_mistake_gives_one_line_and_an_exit_status(tmp_path, arguments, status, said):
    given = [str(tmp_path / "run") if argument == "DIR" else argument for argument in arguments]
    done = subprocess.run([*ATOLL, *given], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=_plain())
    assert done.returncode == status, done.stderr
    assert said in done.stderr.replace("│", "").replace("\n", " ").replace("  ", " ")
    assert "Traceback" not in done.stderr


def _plain() -> dict[str, str]:
    import os

    return dict(os.environ, COLUMNS="200", TERM="dumb", NO_COLOR="1")


def test_a_used_port_and_a_used_directory_are_named(tmp_path):
    with core(tmp_path) as running:
        for arguments, said in (
            (["--dir", str(tmp_path / "other"), "--listen", running.address], "cannot be bound: the port is in use"),
            (["--dir", str(running.directory), "--listen", "127.0.0.1:0"], "is in use by another core"),
        ):
            done = subprocess.run([*ATOLL, "core", *arguments], capture_output=True, text=True, timeout=60)
            assert done.returncode == 1
            assert said in done.stderr.splitlines()[-1]
            assert ".cc:" not in done.stderr, "gRPC's own log must stay silent"


@pytest.mark.ci
def test_a_core_that_is_stopped_as_soon_as_it_serves_ends_cleanly(tmp_path):
    with core(tmp_path) as running:
        for _ in range(3):
            running.stop()
            assert running.child.process.returncode == 0, running.log()
            running.start()


@pytest.mark.ci
def test_a_run_keeps_its_settings_and_refuses_some_changes(tmp_path):
    with core(tmp_path, "--outer-lr", "0.7") as running:
        train(running.address, "a", steps=20)
        running.stop()
        running._options = []
        running.start()
        assert running.status().settings.inner_steps == 4
        running.stop()
        for arguments, said in ((["--fragments", "3"], "the run has 2"), (["--codec", "int8"], "the run uses int4")):
            done = subprocess.run(
                [*ATOLL, "core", "--dir", str(running.directory), "--listen", "127.0.0.1:0", *arguments],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert done.returncode == 1
            assert said in done.stderr


def test_a_second_learner_with_a_connected_name_is_refused_and_the_first_continues(tmp_path, monkeypatch):
    import atoll

    monkeypatch.setattr("atoll.agent.run_session.DUPLICATE_S", 2.0)
    with core(tmp_path) as running:
        leave = []
        first = Trainee(running.address, "a", lambda _: bool(leave))
        first.start()
        eventually(lambda: len(first.losses) > 5)
        second = Trainee(running.address, "a", lambda _: True)
        second.start()
        with pytest.raises(atoll.LearnerError, match='a learner named "a" is already connected'):
            second.done()
        before = len(first.losses)
        eventually(lambda: len(first.losses) > before + 5)
        leave.append(True)
        first.done()
        assert running.status().learners[0].incarnation == 1


def test_a_learner_with_another_model_is_told_which_tensor_differs(tmp_path):
    import atoll
    from torch import nn

    with core(tmp_path) as running:
        train(running.address, "a", steps=10)
        wider = nn.Sequential(nn.Embedding(32, 17), nn.Linear(17, 48), nn.ReLU(), nn.Linear(48, 32))
        other = Trainee(running.address, "b", lambda _: True, model=wider)
        other.start()
        with pytest.raises(atoll.LearnerError, match=r'"0.weight" is float32 \[32, 17\]'):
            other.done()
