"""An operator pauses and resumes a run. The core reports rounds, events and learners' states."""

from __future__ import annotations

import json
import time

import pytest
from atoll.demo.processes import ATOLL
from atoll_wire import outer_pb2 as pb

from tests.end_to_end.test_operators import atoll
from tests.end_to_end.world import Core, Trainee, core, eventually


def pause(running: Core, reason: str) -> None:
    with running.operator() as stub:
        stub.Pause(pb.PauseRequest(reason=reason), timeout=20)


def states(running: Core) -> dict[str, str]:
    return {each.learner: each.state for each in running.status().learners}


def test_a_paused_run_stays_paused_over_a_restart_until_it_is_resumed(tmp_path):
    end: list[bool] = []
    with core(tmp_path) as running:
        trainees = [Trainee(running.address, name, lambda _: bool(end)) for name in ("a", "b")]
        for trainee in trainees:
            trainee.start()
        eventually(lambda: running.status().contributions.merged > 4)
        said = atoll("pause", "--yes", "--server", running.address, "--reason", "maintenance")
        assert (said.returncode, said.stdout) == (0, "the run is paused: maintenance\n")
        again = atoll("pause", "--yes", "--server", running.address, "--reason", "upgrade").stdout
        assert again == "the run is paused: upgrade (it was paused before: by an operator: maintenance)\n"
        pause(running, "maintenance")
        eventually(lambda: states(running) == {"a": "paused", "b": "paused"})
        # Open rounds close. A late contribution waits for the next round.
        eventually(lambda: {each.state for each in running.status().fragments} == {"between rounds"})
        assert running.status().paused == "by an operator: maintenance"
        before, steps = running.status(), [len(trainee.losses) for trainee in trainees]
        began = time.monotonic()
        running.kill()
        running.start()
        eventually(lambda: states(running) == {"a": "paused", "b": "paused"})
        after = running.status()
        assert after.paused == before.paused
        assert after.merges == before.merges
        assert [len(trainee.losses) for trainee in trainees] == steps, "a learner took a step in a paused run"
        latecomer = Trainee(running.address, "c", lambda trainee: bool(end) and len(trainee.losses) > 1)
        latecomer.start()
        eventually(lambda: states(running).get("c") in {"paused", "joining"} and len(latecomer.losses) == 1)
        stood_s = time.monotonic() - began
        assert atoll("resume", "--server", running.address).stdout == "the run was resumed\n"
        lines = map(json.loads, (running.directory / "audit.jsonl").read_text().splitlines())
        assert ["reason" in line for line in lines if line["act"] == "resume"] == [False]
        eventually(lambda: running.status().merges > after.merges + 2)
        end.append(True)
        for trainee in (*trainees, latecomer):
            trainee.done()
        final = running.status()
        # The run was already paused when the core started, so only later changes are reported.
        eventually(lambda: [each.text for each in events(running) if each.kind in {"paused", "resumed"}] == ["resumed"])
    for trainee in trainees:
        stats = trainee.learner.stats()
        assert stats.paused_s > 0.8 * stood_s
        assert stats.blocked_s < 0.2 * stood_s, "paused time must not count as blocked"
    a = next(each for each in final.learners if each.learner == "a")
    assert a.goodput.lost_s["blocked"] + a.goodput.lost_s["other"] < 0.5 * stood_s, "nor as lost"


def test_a_run_that_is_not_paused_is_not_resumed(tmp_path):
    with core(tmp_path) as running:
        done = atoll("resume", "--server", running.address)
        assert (done.returncode, done.stdout) == (0, "the run is not paused\n")
        pause(running, "")  # a dashboard may request this if another operator has already resumed the run
        assert {each.kind for each in events(running)} == {"core"}
        running.stop()
        assert "resume" not in (running.directory / "audit.jsonl").read_text()


def test_an_evicted_learner_leaves_a_paused_run(tmp_path):
    with core(tmp_path) as running:
        trainee = Trainee(running.address, "a", lambda _: False)
        trainee.start()
        eventually(lambda: running.status().contributions.merged > 1)
        pause(running, "night")
        eventually(lambda: states(running) == {"a": "paused"})
        with running.operator() as stub:
            stub.Evict(pb.EvictRequest(learner="a", reason="not wanted"), timeout=20)
        trainee.join(20)
        assert "was evicted (not wanted)" in str(trainee.error)


def events(running: Core) -> list[pb.Event]:
    with running.operator() as stub:
        return list(stub.ListEvents(pb.ListEventsRequest(), timeout=20).events)


def told_rounds(running: Core) -> list[pb.Round]:
    with running.operator() as stub:
        return list(stub.ListRounds(pb.ListRoundsRequest(), timeout=20).rounds)


def _adopted(each: pb.Round) -> bool:
    return any(answer.adopted_at > each.published_at > 0 for answer in each.answers)


def test_rounds_and_events_are_listed(tmp_path):
    with core(tmp_path) as running:
        end: list[bool] = []
        trainees = [Trainee(running.address, name, lambda _: bool(end), region="eu") for name in ("a", "b")]
        for trainee in trainees:
            trainee.start()
        eventually(lambda: running.status().contributions.merged > 20)
        # The core learns of an adoption from a learner's next report.
        eventually(lambda: any(_adopted(each) for each in told_rounds(running)))
        with running.operator() as stub:
            rounds = stub.ListRounds(pb.ListRoundsRequest(last=10), timeout=20).rounds
            mine = stub.ListRounds(pb.ListRoundsRequest(last=10, learner="a"), timeout=20).rounds
        end.append(True)
        for trainee in trainees:
            trainee.done()
        eventually(lambda: set(states(running).values()) == {"left"})
        eventually(lambda: [event.kind for event in events(running)].count("left") == 2)
        told = {(event.kind, event.learner) for event in events(running)}
    assert {("joined", "a"), ("joined", "b"), ("left", "a"), ("core", "")} <= told
    assert 0 < len(rounds) <= 10
    merged = [each for each in rounds if each.outcome == pb.ROUND_OUTCOME_MERGED]
    assert merged, rounds
    for each in merged:
        assert each.opened_at <= each.closed_at <= each.merged_at <= each.published_at
        for answer in each.answers:
            if answer.durable_at and not answer.late:
                assert each.opened_at <= answer.began_at <= answer.durable_at
        assert 0 < sum(answer.weight for answer in each.answers) < 1 + 1e-6
    assert all([answer.learner for answer in each.answers] == ["a"] for each in mine)
    assert abs(rounds[0].opened_at - time.time()) < 60


@pytest.mark.ci
def test_a_learner_leaves_a_paused_run_at_sigterm(tmp_path):
    """At SIGTERM, the reference learner sends its work and leaves."""
    with core(tmp_path) as running:
        where = ["--server", running.address, "--name", "a", "--batch", "1"]
        learner = running.group.start("learner", [*ATOLL, "learner", *where])
        eventually(lambda: running.status().contributions.merged > 1, 60)
        pause(running, "night")
        eventually(lambda: states(running) == {"a": "paused"})
        running.group.stop(learner)
        assert learner.process.returncode == 0, learner.tail()
        assert states(running) == {"a": "left"}
        eventually(lambda: running.status().contributions.pending == 0)
