"""Every unit is consumed once, and each merge of a unit is counted, whatever happens to learners."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from atoll_server.data.accounts import Accounts, Changes, Declared, Lease, LeasedUnit, Outcome, numbers_in, runs_of
from atoll_server.data.merged_units import MAX_LEASES, MAX_RUNS, MergedUnits, UnitRange, with_merged
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = {0: 5, 1: 3, 2: 2}  # fragment 0, alone or with another one, has at least half of the parameters
PARAMETERS = sum(LENGTHS.values())


def declared(units: int = 6, epochs: int = 1) -> Declared:
    return Declared("corpus", units, 0, 1, epochs, "")


def leased(accounts: Accounts, learner: str, count: int, number: int = 1, incarnation: int = 1) -> Lease:
    changes = Changes()
    (dataset,) = accounts.datasets.values() or [accounts.add(declared(), changes)]
    lease = Lease(number, dataset.id, learner, incarnation)
    accounts.open_lease(lease, changes)
    accounts.hand_out(lease, count, changes)
    return lease


def merge(lease: Lease, after: int, upto: int, *fragments: int) -> None:
    for fragment in fragments:
        old = lease.by_fragment.get(fragment, MergedUnits())
        lease.by_fragment[fragment] = old.plus(UnitRange(lease.id, after, upto))


def decided(accounts: Accounts, lease: Lease) -> tuple[int, int, int, list[int]]:
    accounts.decide(lease, Changes())
    (dataset,) = accounts.datasets.values()
    return dataset.consumed, dataset.repeated, dataset.lost, dataset.pool


def test_a_unit_is_consumed_when_every_fragment_has_merged_it():
    accounts = Accounts(LENGTHS)
    lease = leased(accounts, "a", 2)
    merge(lease, 0, 1, 0, 1)
    assert decided(accounts, lease) == (0, 0, 0, [])
    merge(lease, 0, 2, 2)
    assert decided(accounts, lease) == (1, 0, 0, [])
    assert list(lease.units) == [2]


def test_half_of_the_parameters_are_enough_and_the_rest_is_lost():
    accounts = Accounts(LENGTHS)
    lease = leased(accounts, "a", 1)
    merge(lease, 0, 1, 0)
    merge(lease, 1, 1, 1, 2)  # the next merged work begins after the unit, so the unit's work was dropped
    assert decided(accounts, lease) == (1, 0, 5, [])


def test_less_than_half_returns_the_unit_and_its_merged_part_is_repeated():
    accounts = Accounts(LENGTHS)
    lease = leased(accounts, "a", 1)
    merge(lease, 0, 1, 1)
    merge(lease, 1, 1, 0, 2)
    assert decided(accounts, lease) == (0, 3, 0, [0])


def test_a_lost_learners_units_wait_until_none_of_its_work_can_be_merged():
    accounts = Accounts(LENGTHS)
    lease = leased(accounts, "a", 2)
    accounts.end(lease, "fenced", Changes())
    assert decided(accounts, lease) == (0, 0, 0, [])
    merge(lease, 0, 1, 0)
    lease.settled = True
    assert decided(accounts, lease) == (1, 0, 5, [1])
    assert not accounts.leases


def test_later_merges_of_units_that_were_decided_early_are_counted():
    accounts = Accounts(LENGTHS)
    lease = leased(accounts, "a", 2)
    accounts.end(lease, "silent", Changes())
    merge(lease, 0, 1, 0)
    lease.overdue = True
    assert decided(accounts, lease) == (1, 0, 5, [1])
    merge(lease, 1, 2, 0)
    merge(lease, 0, 2, 1)
    assert decided(accounts, lease) == (1, 8, 2, [1])
    merge(lease, 0, 2, 2)
    assert decided(accounts, lease) == (1, 10, 0, [1])
    assert not accounts.leases


def test_returned_units_are_handed_out_first_and_an_epoch_begins_after_the_last_unit_of_the_one_before():
    accounts = Accounts(LENGTHS)
    dataset = accounts.add(declared(3, epochs=2), Changes())
    lost = leased(accounts, "a", 2)
    accounts.end(lost, "fenced", Changes())
    lost.settled = True
    accounts.decide(lost, Changes())
    lease = leased(accounts, "b", 4, number=2)
    assert [unit.position for unit in lease.units.values()] == [0, 1, 2, 3]
    assert dataset.epoch == 1


def test_the_end_is_known_only_if_all_leases_live_with_finished_units():
    accounts = Accounts(LENGTHS)
    one, two = leased(accounts, "a", 3), leased(accounts, "b", 3, number=2)
    (dataset,) = accounts.datasets.values()
    one.finished = 3
    assert not accounts.all_finished(dataset)
    two.finished = 3
    assert accounts.all_finished(dataset)
    accounts.end(one, "fenced", Changes())
    assert not accounts.all_finished(dataset)


@pytest.mark.parametrize(("after", "upto"), [(0, 3), (2, 3), (3, 3), (1, 2)])
def test_a_learner_cannot_have_a_unit_merged_twice_in_a_fragment(after, upto):
    merged = MergedUnits().plus(UnitRange(1, 0, 3))
    assert merged.plus(UnitRange(1, after, upto)) == merged


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_merged_units_behave_like_a_set(steps):
    merged, known, at = MergedUnits(), set[int](), 0
    for gap, length in steps:
        merged = merged.plus(UnitRange(1, at + gap, at + gap + length))
        known |= set(range(at + gap + 1, at + gap + length + 1))
        at += gap + length
    assert {each for each in range(at + 2) if merged.contains(each)} == known
    assert merged.through == at
    assert MergedUnits.from_data(merged.as_data()) == merged
    assert len(merged.runs) == len(runs_of(sorted(known)))


def test_a_learner_that_invents_leases_and_gaps_uses_a_limited_amount_of_memory():
    known: dict[int, MergedUnits] = {}
    for number in range(1, 2 * MAX_RUNS):
        gaps = [UnitRange(lease, 2 * number, 2 * number + 1) for lease in range(1, MAX_LEASES)]
        known = with_merged(known, [*gaps, UnitRange(MAX_LEASES + number, 0, 1)])
    assert len(known) == MAX_LEASES
    assert max(len(each.runs) for each in known.values()) == MAX_RUNS
    assert known[1].contains(2 * number + 1), "the newest units must be kept"
    assert not known[1].contains(3)
    assert known[1].through == 2 * number + 1
    assert known[MAX_LEASES + number].contains(1)


@given(st.sets(st.integers(0, 60)))
def test_runs_hold_the_same_numbers(numbers):
    assert numbers_in(runs_of(sorted(numbers))) == sorted(numbers)


# ------------------------------------------------------------------------------------------- any order of events


@dataclass
class Trainer:
    """One learner process: its finished units, and the sent and pending work of each fragment."""

    lease: Lease
    finished: int = 0
    begins: dict[int, int] = field(default_factory=lambda: dict.fromkeys(LENGTHS, 0))  # by fragment
    pending: dict[int, UnitRange] = field(default_factory=dict)
    alive: bool = True


class Life:
    """Learners that die, fall silent and return, with a record of every merge."""

    def __init__(self, rng: random.Random, units: int, epochs: int) -> None:
        self.rng = rng
        self.accounts = Accounts(LENGTHS)
        self.dataset = self.accounts.add(declared(units, epochs), Changes())
        self.trainers: list[Trainer] = []
        self.truth: Counter[int] = Counter()  # position -> parameters of all merges that contain it
        self.leases = 0

    def begin(self) -> None:
        self.leases += 1
        lease = Lease(self.leases, self.dataset.id, f"learner {self.leases}", 1)
        self.accounts.open_lease(lease, Changes())
        self.trainers.append(Trainer(lease))

    def lease(self, trainer: Trainer) -> None:
        if trainer.alive and not trainer.lease.ended:
            self.accounts.hand_out(trainer.lease, self.rng.randint(1, 3), Changes())

    def finish(self, trainer: Trainer) -> None:
        if trainer.alive and trainer.finished < trainer.lease.handed:
            trainer.finished += 1

    def send(self, trainer: Trainer) -> None:
        fragment = self.rng.choice(list(LENGTHS))
        if trainer.alive and fragment not in trainer.pending:
            trainer.pending[fragment] = UnitRange(trainer.lease.id, trainer.begins[fragment], trainer.finished)

    def fate(self, trainer: Trainer, merges: float = 0.6) -> None:
        """Merges a pending contribution, refuses it, or refuses it so that the learner drops its work."""
        if not trainer.pending:
            return
        fragment = self.rng.choice(list(trainer.pending))
        sent = trainer.pending.pop(fragment)
        if self.rng.random() < merges:
            for ordinal in range(sent.after + 1, sent.upto + 1):
                self.truth[positions[trainer.lease.id, ordinal]] += LENGTHS[fragment]
            merge(trainer.lease, sent.after, sent.upto, fragment)
            trainer.begins[fragment] = sent.upto
        elif self.rng.random() < 0.5:
            trainer.begins[fragment] = trainer.finished

    def kill(self, trainer: Trainer) -> None:
        trainer.alive = False
        self.accounts.end(trainer.lease, "fenced", Changes())

    def silence(self, trainer: Trainer) -> None:
        self.accounts.end(trainer.lease, "silent", Changes())
        trainer.lease.overdue = True

    def overdue(self, trainer: Trainer) -> None:
        trainer.lease.overdue |= bool(trainer.lease.ended)

    def look(self, trainer: Trainer) -> None:
        trainer.lease.settled = not trainer.alive and not trainer.pending
        if trainer.lease.id in self.accounts.leases:
            self.accounts.decide(trainer.lease, Changes())

    def check(self) -> None:
        held = [
            unit
            for lease in self.accounts.leases.values()
            for unit in lease.units.values()
            if unit.outcome is Outcome.LEASED
        ]
        outstanding = Counter(unit.position for unit in held) + Counter(self.dataset.pool)
        assert not [each for each, count in outstanding.items() if count > 1], "a unit has two holders"
        assert self.dataset.consumed == self.dataset.next - len(outstanding), "a unit is lost, or consumed twice"
        assert self.dataset.leased == len(held)
        sums = self.dataset.consumed * PARAMETERS + self.dataset.repeated - self.dataset.lost
        assert sums + sum(map(self.accounts.merged_part, held)) == self.known_merges()

    def known_merges(self) -> int:
        """Returns all merges except those that `look` has not seen."""
        unseen = 0
        for trainer in self.trainers:
            for unit in trainer.lease.units.values():
                if unit.outcome is not Outcome.LEASED and trainer.lease.id in self.accounts.leases:
                    unseen += self.accounts.merged_part(unit) - unit.merged
        return sum(self.truth.values()) - unseen


positions: dict[tuple[int, int], int] = {}


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_no_order_of_events_loses_a_unit_or_a_merge(seed, units, epochs):
    life = Life(random.Random(seed), units, epochs)
    positions.clear()
    acts = (life.lease, life.finish, life.finish, life.send, life.send, life.fate, life.fate, life.look, life.look)
    rare = (life.kill, life.silence, life.overdue)
    for _ in range(life.rng.randint(10, 250)):
        if not life.trainers or life.rng.random() < 0.05:
            life.begin()
        act = life.rng.choice(acts if life.rng.random() < 0.95 else rare)
        act(life.rng.choice(life.trainers))
        note(life)
        life.check()
    for trainer in life.trainers:
        life.kill(trainer)
    life.begin()
    last = life.trainers[-1]
    for _ in range(10 * units * epochs):  # one undisturbed learner trains the rest
        for trainer in life.trainers:
            while trainer.pending:
                life.fate(trainer, merges=1.0)
            life.look(trainer)
        life.lease(last)
        note(life)
        last.finished = last.lease.handed
        for fragment in LENGTHS:
            last.pending[fragment] = UnitRange(last.lease.id, last.begins[fragment], last.finished)
        life.check()
    assert life.dataset.consumed == units * epochs
    assert life.dataset.pool == []
    assert sum(life.truth.values()) == units * epochs * PARAMETERS + life.dataset.repeated - life.dataset.lost


def note(life: Life) -> None:
    """Records the position of each ordinal, because decided units are forgotten."""
    for lease in life.accounts.leases.values():
        for ordinal, unit in lease.units.items():
            assert isinstance(unit, LeasedUnit)
            positions[lease.id, ordinal] = unit.position
