"""A contribution has the same name in the logs of its learner, its front and the core."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from atoll.demo.processes import ATOLL, children, free_port
from atoll_wire import outer_pb2 as pb

from tests.end_to_end.world import Core, eventually

LOUD = ["--log-json", "--log-level", "debug"]


def lines(log: Path, name: str) -> list[str]:
    """Returns the lines of a log about a contribution, in order."""
    told = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [each["event"] for each in told if each.get("contribution") == name or name in each.get("shares", {})]


@pytest.mark.ci
def test_a_contribution_has_one_name_in_every_log(tmp_path):
    with children(tmp_path) as group:
        core = Core(group, tmp_path / "run", ["--fragments", "2", "--inner-steps", "4", *LOUD])
        front, address = group.start_front("front", "127.0.0.1:0", core.address, ["--region", "eu", *LOUD])
        where = ["--server", address, "--name", "eu-1", "--region", "eu", "--max-steps", "40", "--batch", "1"]
        learner = group.start("learner", [*ATOLL, "learner", *where, *LOUD])
        assert learner.process.wait(90) == 0, learner.tail()
        eventually(lambda: core.status().contributions.pending == 0)
        with core.operator() as stub:
            request = pb.ListReceiptsRequest(fate=pb.FATE_MERGED)
            oldest = list(stub.ListReceipts(request, timeout=20).receipts)[-1].receipt
        name = f"{oldest.learner}/{oldest.incarnation}/{oldest.fragment}/{oldest.seq}"
        assert lines(learner.log, name) == [
            "sending a contribution",
            "the core acknowledged a contribution",
            "the core merged a contribution",
        ]
        assert lines(front.log, name)[0] == "forwarding a contribution"
        assert "the core sent a receipt" in lines(front.log, name)
        stored = [line for line in lines(core.child.log, name) if line != "receiving a contribution"]
        assert stored == ["contribution durable", "fragment merged"]
        for log in (learner.log, front.log, core.child.log):
            printed = log.read_text().splitlines()
            text = [line for line in printed if not line.startswith("{")]
            assert all(re.fullmatch(r"atoll (core|front) listens on \S+", line) for line in text), text
            assert all(json.loads(line)["timestamp"] for line in printed if line.startswith("{"))


def test_a_learner_writes_its_stacks_on_sigusr1(tmp_path):
    with children(tmp_path) as group:
        learner = group.start("learner", [*ATOLL, "learner", "--server", f"127.0.0.1:{free_port()}", "--name", "a"])
        eventually(lambda: "waiting for the core" in learner.log.read_text(), 60)
        learner.process.send_signal(signal.SIGUSR1)
        eventually(lambda: "Current thread" in learner.log.read_text())
        assert learner.process.poll() is None


@pytest.mark.ci
def test_without_configured_logging_only_warnings_are_printed(tmp_path):
    """In a user's process, only warnings and errors are logged, on stderr."""
    import subprocess
    import sys

    script = tmp_path / "loop.py"
    script.write_text(
        "import sys, torch, atoll\n"
        "model = torch.nn.Linear(4, 4); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "with atoll.Learner(model, optimizer, server=sys.argv[1], name='a') as learner:\n"
        "    for _ in range(60):\n"
        "        model(torch.ones(1, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "        learner.step(tokens=1)\n"
    )
    with children(tmp_path) as group:
        core = Core(group, tmp_path / "run", ["--fragments", "1", "--inner-steps", "2"])
        done = subprocess.run([sys.executable, script, core.address], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "[debug" not in done.stderr
    assert "sending the initial parameters" in done.stderr
