"""While a learner's work is never merged, `atoll status` names the learner and the fix."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from atoll_wire import outer_pb2 as pb

from tests.end_to_end.test_refusals import Hand
from tests.end_to_end.world import Trainee, core, eventually


def test_status_names_a_learner_whose_work_is_never_merged(tmp_path):
    with core(tmp_path) as running, running.outer() as stub:
        over = threading.Event()
        trainee = Trainee(running.address, "merges", lambda _: over.is_set())
        trainee.start()
        eventually(lambda: running.status().merges > 0)
        idle = Hand(stub, "idle")

        def steps() -> Iterator[pb.Progress]:
            number = 0
            while not over.wait(0.05):
                number += 1
                declined = [pb.Declined(fragment=f.fragment, cycle=f.cycle) for f in running.status().fragments]
                yield pb.Progress(session=idle.session, steps=number, tokens=32 * number, declined=declined)

        reporting = threading.Thread(target=lambda: stub.Report(steps(), timeout=60))
        reporting.start()
        eventually(
            lambda: any(
                each.startswith("no work from idle is being merged: its contributions")
                for each in running.status().troubles
            )
        )
        fragment = running.status().fragments[0]
        idle.versions[0] = fragment.version
        assert idle.push().fate == pb.FATE_PENDING
        eventually(lambda: not running.status().troubles)
        over.set()
        trainee.done()
        reporting.join()
