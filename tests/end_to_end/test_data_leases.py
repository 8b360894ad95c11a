"""The registrar leases units durably, to one process at a time, and counts merged work on them."""

from __future__ import annotations

import grpc
import pytest
from atoll.data import Rows, Units
from atoll.data.units import declaration
from atoll_server.checkpoints.rollback import roll_back
from atoll_wire import outer_pb2 as pb
from atoll_wire.unit_order import unit_at

from tests.end_to_end.test_refusals import Hand, refused, request, taken_over
from tests.end_to_end.world import Core, Trainee, core, eventually, train

pytestmark = pytest.mark.ci  # a lost learner's lease ends only after some seconds

UNITS = 10
STATES = pb.LeaseUnitsReply


def corpus(**changes) -> pb.DatasetDeclaration:
    fields = {"name": "corpus", "units": UNITS, "tokens": 5, "seed": 3, "epochs": 2, "fingerprint": b"\x01"}
    return pb.DatasetDeclaration(**(fields | changes))


def lease(hand: Hand, wanted: int = 3, dataset: pb.DatasetDeclaration | None = None, **fields) -> pb.LeaseUnitsReply:
    asked = pb.LeaseUnitsRequest(session=hand.session, dataset=dataset or corpus(), wanted=wanted, **fields)
    return hand.stub.LeaseUnits(asked, timeout=20)


def order(first: int, count: int) -> list[int]:
    return [unit_at(each % UNITS, UNITS, 3, each // UNITS) for each in range(first, first + count)]


def account(running: Core, name: str = "corpus") -> tuple[int, int, int, float, float]:
    (found,) = (each for each in running.status().datasets if each.name == name)
    return found.consumed, found.leased, found.returned, round(found.repeated, 3), round(found.lost, 3)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with core(tmp_path_factory.mktemp("core"), "--fragments", "1") as running:
        begin(running)
        yield running


def begin(running: Core) -> None:
    """Gives the run parameters, and waits until all contributions are merged."""
    train(running.address, "a", steps=8)
    eventually(lambda: running.status().contributions.pending == 0)


def test_units_come_in_the_seeds_order_and_are_repeated_until_received(running):
    with running.outer() as stub:
        one, two = Hand(stub, "one"), Hand(stub, "two")
        first = lease(one)
        assert (first.state, list(first.units), list(first.epochs)) == (STATES.STATE_LEASED, order(0, 3), [0, 0, 0])
        assert list(lease(two).units) == order(3, 3)
        again = lease(one)  # the reply was lost, so the learner does not know its lease
        assert (again.lease, list(again.units)) == (first.lease, order(0, 3))
        running.kill()
        running.start()
    with running.outer() as stub:
        one = Hand(stub, "one")
        after = lease(one, lease=first.lease, received=1)
        assert (after.lease, list(after.units)) == (first.lease, order(1, 2))
        more = lease(one, wanted=9, lease=first.lease, received=3)
        assert list(more.units) == order(6, 9)
        assert list(more.epochs) == [0] * 4 + [1] * 5
        assert account(running) == (0, 15, 0, 0.0, 0.0)


@pytest.mark.parametrize(
    "change", [{"units": 11}, {"tokens": 6}, {"seed": 4}, {"epochs": 1}, {"fingerprint": b"\x02"}], ids=str
)
def test_another_dataset_under_the_same_name_is_refused(running, change):
    with running.outer() as stub:
        lease(Hand(stub, "three"))
        with refused(
            running, grpc.StatusCode.FAILED_PRECONDITION, 'dataset "corpus" of the run has', next(iter(change))
        ):
            lease(Hand(stub, "four"), dataset=corpus(**change))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dataset": corpus(name="a b")}, "dataset name"),
        ({"dataset": corpus(units=0)}, "0 units"),
        ({"dataset": corpus(units=1 << 50)}, "units"),
        ({"dataset": corpus(fingerprint=bytes(65))}, "too long"),
        ({"received": 1, "finished": 2}, "impossible numbers"),
    ],
    ids=lambda value: str(value)[:20].replace("\n", " "),
)
def test_invalid_lease_requests_are_refused(running, fields, words):
    with running.outer() as stub, refused(running, grpc.StatusCode.INVALID_ARGUMENT, words):
        lease(Hand(stub), **fields)


def test_a_merged_unit_is_consumed_and_those_of_a_lost_learner_are_handed_out_again(running):
    with running.outer() as stub:
        lost, dataset = Hand(stub, "lost"), corpus(name="of-a-lost-learner")
        held = lease(lost, dataset=dataset).lease

        def trained_one(header: pb.PushHeader, _frames) -> None:
            header.units.add(lease=held, after=0, upto=1)

        assert lost.push(trained_one).fate == pb.FATE_PENDING
        eventually(lambda: account(running, dataset.name) == (1, 2, 0, 0.0, 0.0))
        reply = taken_over(stub, request("lost", nonce=77))
        eventually(lambda: account(running, dataset.name) == (1, 0, 2, 0.0, 0.0))
        lost.session.incarnation, lost.session.token = reply.incarnation, reply.token
        assert list(lease(lost, wanted=4, dataset=dataset).units) == order(1, 4)
    assert account(running, dataset.name) == (1, 4, 0, 0.0, 0.0)


def test_a_merge_after_the_units_were_returned_counts_as_repeated(tmp_path):
    with core(tmp_path, "--fragments", "1", "--limit-units-silence-s", "1") as running:
        begin(running)
        with running.outer() as stub:
            silent = Hand(stub, "silent")
            held = lease(silent, wanted=1).lease
            eventually(lambda: account(running) == (0, 0, 1, 0.0, 0.0))
            silent.push(lambda header, _: header.units.add(lease=held, after=0, upto=1))
            eventually(lambda: account(running) == (0, 0, 1, 1.0, 0.0))


def test_the_registrar_announces_the_end_when_every_unit_is_consumed(running):
    with running.outer() as stub:
        one, two, dataset = Hand(stub, "one"), Hand(stub, "two"), corpus(name="that-ends")
        mine, other = lease(one, 12, dataset), lease(two, 9, dataset)
        assert len(other.units) == 8
        asked = lease(one, 1, dataset, lease=mine.lease, received=12, finished=12)
        assert (asked.state, asked.held_by) == (STATES.STATE_WAIT, ["two"])
        asked = lease(two, 1, dataset, lease=other.lease, received=8, finished=8)
        assert asked.state == STATES.STATE_FINISHED


def test_a_learner_that_waits_for_other_learners_units_counts_as_paused(running):
    source, mine = Rows(list(range(8)), 2), list[Units]()

    def is_over(trainee: Trainee) -> bool:
        if not mine:
            mine.append(trainee.learner.units(source, "waited-for"))
        return not list(mine[0]) and not mine[0].more()

    with running.outer() as stub:
        holder = Hand(stub, "holder")
        assert len(lease(holder, 4, declaration(source, "waited-for", 0, 1)).units) == 4
        waiting = Trainee(running.address, "waiting", is_over)
        waiting.start()
        states = lambda: {each.learner: each.state for each in running.status().learners}  # noqa: E731
        eventually(lambda: states().get("waiting") == "paused")
        stub.Leave(pb.LeaveRequest(session=holder.session), timeout=20)
        waiting.done()
    eventually(lambda: account(running, "waited-for")[:3] == (4, 0, 0))
    assert waiting.learner.stats().paused_s > 0


def test_units_of_a_learner_that_is_written_off_return(running):
    def is_written_off() -> bool:
        with running.operator() as operator:
            try:
                operator.Evict(pb.EvictRequest(learner="ended", gone=True), timeout=20)
            except grpc.RpcError as error:
                assert "reported" in error.details()
                return False
        return True

    dataset = corpus(name="of-an-ended-learner")
    with running.outer() as stub:
        lease(Hand(stub, "ended"), 3, dataset)
    assert account(running, dataset.name)[:3] == (0, 3, 0)
    eventually(is_written_off, 60)
    eventually(lambda: account(running, dataset.name)[:3] == (0, 0, 3))


def test_invalid_ranges_of_units_are_refused(running):
    def reversed_range(header: pb.PushHeader, _frames) -> None:
        header.units.add(lease=1, after=2, upto=1)

    with running.outer() as stub, refused(running, grpc.StatusCode.INVALID_ARGUMENT, "ranges of data units"):
        Hand(stub).push(reversed_range)


def test_a_restore_to_a_checkpoint_returns_the_units_that_were_consumed_after_it(tmp_path):
    with core(tmp_path, "--fragments", "1") as running:
        begin(running)
        with running.outer() as stub:
            hand = Hand(stub)
            held = lease(hand, wanted=4).lease
            merged(hand, running, held, 0, 1)
            with running.operator() as operator:
                checkpoint = operator.TakeCheckpoint(pb.TakeCheckpointRequest(), timeout=20)
            merged(hand, running, held, 1, 3)
            assert account(running) == (3, 1, 0, 0.0, 0.0)
        running.stop()
        roll_back(running.directory, checkpoint.id)
        running.start()
        assert account(running) == (1, 0, 3, 0.0, 0.0)
        with running.outer() as stub:
            assert list(lease(Hand(stub), wanted=4).units) == order(1, 4)


def merged(hand: Hand, running: Core, held: int, after: int, upto: int) -> None:
    """Sends a contribution that names units, and waits until they are consumed."""
    version = running.status().fragments[0].version

    def trained(header: pb.PushHeader, _frames) -> None:
        header.base_version = version
        header.units.add(lease=held, after=after, upto=upto)

    assert hand.push(trained, seq=upto).fate == pb.FATE_PENDING
    eventually(lambda: account(running)[0] == upto)
