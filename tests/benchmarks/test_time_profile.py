"""Sampled stacks become shares of the time in syncs. Other stacks are left out."""

from __future__ import annotations

from benchmarks.data_plane import time_profile

STACKS = """\
process 1:"python -m benchmarks.data_plane.sync";main (benchmarks/data_plane/sync.py);measure (benchmarks/data_plane/sync.py) 50
process 2:"python -m benchmarks.data_plane.sync_core x";run (asyncio/runners.py);Handle._run (asyncio/events.py);Push (service.py) 6
process 2:"python -m benchmarks.data_plane.sync_core x";Thread.run (threading.py);_WorkItem.run (concurrent/thread.py);compress (atoll_wire/codec/compression.py);call (zstd.py) 3
process 2:"python -m benchmarks.data_plane.sync_core x";Thread.run (threading.py);_worker (concurrent/thread.py) 90
process 2:"python -m benchmarks.data_plane.sync_core x";warm_up (atoll_wire/codec/frame_codec.py) 40
process 3:"python -m benchmarks.data_plane.sync_learner 0";main (benchmarks/data_plane/sync_learner.py);Learner.step (learner.py);_adopt (learner.py) 1
process 3:"python -m benchmarks.data_plane.sync_learner 0" 2
"""  # noqa: E501 - as py-spy writes them


def test_waiting_threads_the_start_and_the_measuring_process_are_left_out():
    assert time_profile.places(STACKS) == {
        ("core", "event loop", "asyncio, gRPC"): 6,
        ("core", "worker threads", "kernels, compression, checksums"): 3,
        ("learners", "training loop", "other Python"): 1,
    }
