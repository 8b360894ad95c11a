"""The schedule of `atoll chaos`: random failures, lists, Procfiles."""

from __future__ import annotations

import pytest
from atoll.chaos.local_deployment import procfile, reference
from atoll.chaos.schedule import CORE, KILL, PAUSE, Fault, ScheduleError, parse, random_faults
from atoll.demo.processes import DemoError

NAMES = ("a", "b", "c", "d")


def test_a_schedule_is_read_in_the_order_of_its_times():
    assert parse("40:kill:core, 12.5:kill:a,30:pause:b:5", (*NAMES, CORE)) == [
        Fault(12.5, KILL, "a"), Fault(30.0, PAUSE, "b", 5.0), Fault(40.0, KILL, CORE),
    ]  # fmt: skip


WRONG = ("soon:kill:a", "12:kill", "12:pause:a", "12:tickle:a", "12:kill:nobody", "-1:kill:a", "12:pause:a:-1",
         "nan:kill:a")  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_an_invalid_schedule_is_refused_in_one_line(text):
    with pytest.raises(ScheduleError, match=r"^--schedule"):
        parse(text, NAMES)


def test_random_kills_have_the_mean_time_and_follow_from_the_seed():
    faults = random_faults(7, 60_000.0, NAMES, 60.0, 300.0, 0.25)
    assert faults == random_faults(7, 60_000.0, NAMES, 60.0, 300.0, 0.25)
    assert faults != random_faults(8, 60_000.0, NAMES, 60.0, 300.0, 0.25)
    learners = [fault for fault in faults if fault.target != CORE]
    assert len(learners) == pytest.approx(1000, rel=0.15)
    assert len(faults) - len(learners) == pytest.approx(200, rel=0.3)
    assert sum(fault.what == PAUSE for fault in learners) == pytest.approx(250, rel=0.3)
    assert {fault.target for fault in learners} == set(NAMES)
    assert random_faults(7, 600.0, NAMES, 0.0, 0.0, 0.0) == []


def test_a_procfile_describes_a_deployment(tmp_path):
    path = tmp_path / "Procfile"
    path.write_text("# mine\ncore: atoll core --dir run\n\neu-west: python train.py --name 'eu west'\n")
    found = procfile(path, "127.0.0.1:7070")
    assert found.commands == {
        "core": ["atoll", "core", "--dir", "run"], "eu-west": ["python", "train.py", "--name", "eu west"],
    }  # fmt: skip
    assert found.learners == ["eu-west"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("core: a\nnonsense\n", "line 2"),
        ("core: a\nb: c\nb: d\n", "line 3"),
        ("b: c\n", "add a line `core"),
        ("core: a\n", "for each learner"),
    ],
)
def test_an_invalid_procfile_is_refused_in_one_line(tmp_path, text, said):
    (tmp_path / "Procfile").write_text(text)
    with pytest.raises(DemoError, match=said):
        procfile(tmp_path / "Procfile", "127.0.0.1:7070")


def test_the_reference_deployment_names_its_learners_and_their_core(tmp_path):
    found = reference(tmp_path, 7, "tiny", 8, 1000, 0, ["--fragments=8"])
    assert found.learners[0] == "eu-west"
    assert found.learners[-1] == "island-7"
    assert found.commands[CORE][-1] == "--fragments=8"
    assert all(found.address in command for command in found.commands.values())
