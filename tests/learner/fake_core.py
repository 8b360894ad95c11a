"""A core in threads of the test process. The test controls it, and can make it fail.

Rounds open and merges happen only on request. A merge is the plain mean. As in a real core, durable data survives
`restart`, but sessions and the cache of updates do not. Not an asyncio server: gRPC shares one event queue among all
loops of a process (grpc/grpc#25364), and these tests are about the agent's loop.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.connections.link import ATOLL_STATUS
from atoll_wire.contract import tensor_spec
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import Layout, plan
from safetensors.torch import load

RUN, CODEC = "fake", Codec.INT4
Key = tuple[str, int, int, int]  # learner, incarnation, fragment, seq


class FakeCore(rpc.OuterServicer):
    """A core with one run. Its fields, which tests may read, change under the lock of `_news`."""

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.layout: Layout | None = None
        self.theta: list[np.ndarray] = []
        self.versions: list[int] = []
        self.updates: dict[tuple[int, int], tuple[list[bytes], int, list[pb.Receipt]]] = {}
        self.names: dict[str, tuple[int, int]] = {}  # name -> nonce and incarnation
        self.parts: dict[Key, dict[int, bytes]] = defaultdict(dict)
        self.headers: dict[Key, pb.PushHeader] = {}
        self.receipts: dict[Key, pb.Receipt] = {}
        self.rounds: dict[int, int] = {}  # open rounds: fragment -> cycle
        self.run_tokens, self.total_tokens, self.epoch, self.cycle = 0, 0, 1, 0
        self.sessions: set[bytes] = set()
        self.log: list[pb.Notification] = []
        self.joins: list[pb.JoinRequest] = []
        self.follows: list[pb.FollowRequest] = []
        self.fetches: list[pb.FetchRequest] = []
        self.progress: list[pb.Progress] = []
        self.frames: list[tuple[Key, int]] = []  # in order of arrival
        self.left: list[str] = []
        self.answers: dict[str, deque[tuple[grpc.StatusCode, str]]] = defaultdict(deque)
        self.cut_after: int | None = None  # number of frames after which the next Push is cut
        self.lose_acknowledgement = False  # the next Push is accepted, but its acknowledgement is lost
        self.spoil_updates = self.end_follow = False
        self.asked: dict[str, int] = defaultdict(int)  # method -> number of calls, before any check
        self._news = threading.Condition()
        self._gate = threading.Event()
        self._server: grpc.Server
        self.address = ""
        self._serve("127.0.0.1:0")

    # ------------------------------------------------------------------------------ commands of tests

    def hang(self) -> None:
        """Stops answering, but keeps connections open."""
        self._gate.clear()

    def go_on(self) -> None:
        self._gate.set()

    def stop(self) -> None:
        self._server.stop(0).wait()
        with self._news:
            self._news.notify_all()

    def start(self) -> None:
        """Starts the core again after `stop`, on the same port, with the durable data."""
        self.epoch += 1
        self.forget_sessions()
        self.updates.clear()
        self.log.clear()
        self._serve(self.address)

    def forget_sessions(self) -> None:
        self.sessions.clear()

    def open(self, fragment: int) -> None:
        with self._news:
            self.cycle += 1
            self.rounds[fragment] = self.cycle
            self._say(opened=pb.RoundOpened(fragment=fragment, cycle=self.cycle))

    def fail(self, method: str, status: grpc.StatusCode, detail: str = "as the test says", times: int = 1) -> None:
        """Makes the next calls of a method fail with this status."""
        self.answers[method].extend([(status, detail)] * times)

    def pending(self, fragment: int) -> list[Key]:
        held = list(self.receipts.items())
        return sorted(key for key, receipt in held if key[2] == fragment and receipt.fate == pb.FATE_PENDING)

    def merge(self, fragment: int, *, tell: bool = True) -> None:
        """Merges the mean of the pending contributions. tell: whether to announce the new version."""
        with self._news:
            self._merge(fragment)
            if tell:
                version = self.versions[fragment]
                update = pb.UpdatePublished(fragment=fragment, version=version, run_tokens=self.run_tokens)
                self._say(published=update)

    def refuse(self, fragment: int, *, drop: bool, tell: bool = True) -> None:
        """Refuses a contribution after its acknowledgement."""
        with self._news:
            for key in self.pending(fragment):
                receipt = self._receipt(key, pb.FATE_REFUSED, "as the test says", drop=drop)
                if tell:
                    self._say(receipt=receipt)

    def reasons(self) -> list[str]:
        """Returns the reasons of all declined rounds."""
        return [each.reason for progress in list(self.progress) for each in progress.declined]

    # ------------------------------------------------------------------------------ Outer

    def Join(self, request, context):
        self._may("Join", context)
        with self._news:
            self.joins.append(request)
            self.layout = self.layout or plan([tensor_spec(tensor) for tensor in request.tensors], self.fragments)
            nonce, incarnation = self.names.get(request.learner, (request.nonce, 1))
            self.names[request.learner] = (request.nonce, incarnation + (nonce != request.nonce))
            token = f"{request.learner} {request.nonce} {self.epoch}".encode()
            self.sessions.add(token)
            return pb.JoinReply(
                state=pb.JoinReply.STATE_READY if self.theta else pb.JoinReply.STATE_INITIALISE, run=RUN, generation=1,
                epoch=self.epoch, incarnation=self.names[request.learner][1], token=token, retry_s=0.05,
                fingerprint=self.layout.fingerprint, versions=dict(enumerate(self.versions)),
                run_tokens=self.run_tokens,
                shards=[pb.ShardPlace(fragments=range(len(self.layout.fragments)))],
                settings=pb.RunSettings(
                    fragments=len(self.layout.fragments), codec=int(CODEC), inner_steps=4,
                    total_tokens=self.total_tokens,
                ),
            )  # fmt: skip

    def Initialise(self, requests, context):
        self._may("Initialise", context)
        tensors = {n: t.float().numpy().reshape(-1) for n, t in load(b"".join(r.chunk for r in requests)).items()}
        assert self.layout is not None, "the learner must join first"
        for fragment in self.layout.fragments:
            parts = [tensors[self.layout.tensors[p.tensor].name][p.start : p.start + p.length] for p in fragment.pieces]
            self.theta.append(np.concatenate(parts).astype(np.float32))
            self.versions.append(0)
        return pb.InitialiseReply()

    def Follow(self, request, context):
        self._may("Follow", context, request.session)
        epoch = self.epoch
        with self._news:
            self.follows.append(request)
            cursor = request.sequence
            if request.log != epoch:
                cursor = len(self.log)
                opened = [pb.RoundOpened(fragment=f, cycle=c) for f, c in self.rounds.items()]
                current = pb.FullState(versions=dict(enumerate(self.versions)), open=opened, run_tokens=self.run_tokens)
                yield pb.Notification(log=epoch, sequence=cursor, current=current)
        while context.is_active() and self.epoch == epoch and not self.end_follow:
            with self._news:
                if len(self.log) <= cursor and self.epoch == epoch:
                    self._news.wait(0.2)
                news = self.log[cursor:] if self.epoch == epoch else []
            cursor += len(news)
            yield from news

    def Push(self, requests, context):
        header = next(requests).header
        self._may("Push", context, header.session)
        key = (header.session.learner, header.session.incarnation, header.fragment, header.seq)
        if key not in self.receipts:
            lose = self.lose_acknowledgement  # to all streams of this contribution
            self.headers[key] = header
            received = self.parts[key]
            yield pb.PushReply(received=pb.ReceivedFrames(frames=sorted(received)))
            for request in requests:
                if self.cut_after == 0:
                    self.cut_after = None
                    context.abort(grpc.StatusCode.UNAVAILABLE, "cut, as the test says")
                for frame in request.frames:
                    assert crc32c(frame.payload) == frame.crc32c
                    received[frame.index] = frame.payload
                    self.frames.append((key, frame.index))
                self.cut_after = None if self.cut_after is None else self.cut_after - 1
            with self._news:
                while len(received) < header.frames and context.is_active():
                    self._news.wait(0.1)  # other streams send the rest
                if key not in self.receipts and len(received) == header.frames:
                    self.rounds.pop(header.fragment, None)
                    self._receipt(key, pb.FATE_PENDING)
                self._news.notify_all()
            if lose:
                self.lose_acknowledgement = False
                context.abort(grpc.StatusCode.UNAVAILABLE, "lost, as the test says")
        yield pb.PushReply(receipt=self.receipts[key])

    def Fetch(self, request, context):
        self._may("Fetch", context, request.session)
        self.fetches.append(request)
        with self._news:
            fragment = self.layout.fragments[request.fragment]
            if request.whole:
                theta, version, coded = self.theta[request.fragment], self.versions[request.fragment], Codec.FLOAT32
                crc = frame_codec.vector_crc32c(theta)
                payloads = [frame_codec.encode_frame(theta, span, coded) for span in fragment.frames]
                who = (request.session.learner, request.session.incarnation, request.fragment)
                receipts = [self.receipts[key] for key in sorted(self.receipts) if key[:3] == who][-1:]
            elif (request.fragment, request.version) not in self.updates:
                _refuse(context, grpc.StatusCode.NOT_FOUND, "not kept: fetch the fragment whole")
            else:
                version, coded = request.version, CODEC
                payloads, crc, receipts = self.updates[request.fragment, request.version]
                crc ^= int(self.spoil_updates)
        yield pb.FetchReply(
            header=pb.FetchHeader(
                fragment=request.fragment, version=version, codec=int(coded), frames=len(payloads),
                size_bytes=sum(map(len, payloads)), crc32c=crc, receipts=receipts,
            )
        )  # fmt: skip
        for index in request.frames or range(len(payloads)):
            payload = payloads[index]
            yield pb.FetchReply(frames=[pb.Frame(index=index, crc32c=crc32c(payload), payload=payload)])

    def Report(self, requests, context):
        try:
            first = next(requests)
            self._may("Report", context, first.session)
            self.progress.append(first)
            self.progress.extend(requests)
        except grpc.RpcError:  # the learner ended the call
            pass
        return pb.ReportReply()

    def Leave(self, request, context):
        self._may("Leave", context, request.session)
        self.progress.append(request.last)
        self.left.append(request.session.learner)
        return pb.LeaveReply()

    # ------------------------------------------------------------------------------ internals

    def _may(self, method: str, context: grpc.ServicerContext, session: pb.Session | None = None) -> None:
        self.asked[method] += 1
        self._gate.wait()
        if self.answers[method]:
            _refuse(context, *self.answers[method].popleft())
        if session is not None and session.token not in self.sessions:
            _refuse(context, grpc.StatusCode.UNAUTHENTICATED, "unknown session: join again")

    def _merge(self, fragment_index: int) -> None:
        fragment, keys = self.layout.fragments[fragment_index], self.pending(fragment_index)
        mean = np.zeros(fragment.length, np.float32)
        for key in keys:
            for span in fragment.frames:
                shares = np.full(len(span.segments), 1 / len(keys), np.float32)
                frame_codec.decode_add(self.parts[key][span.index], span, CODEC, shares, mean)
        payloads = [frame_codec.encode_frame(-mean, span, CODEC) for span in fragment.frames]
        theta = self.theta[fragment_index].copy()
        for span in fragment.frames:
            frame_codec.decode_add(payloads[span.index], span, CODEC, np.ones(len(span.segments), np.float32), theta)
        self.theta[fragment_index] = theta
        self.versions[fragment_index] += 1
        receipts = [self._receipt(key, pb.FATE_MERGED) for key in keys]
        version = self.versions[fragment_index]
        self.updates[fragment_index, version] = (payloads, frame_codec.vector_crc32c(theta), receipts)

    def _receipt(self, key: Key, fate: Any, reason: str = "", *, drop: bool = False) -> pb.Receipt:
        learner, incarnation, fragment, seq = key
        self.receipts[key] = pb.Receipt(
            learner=learner, incarnation=incarnation, fragment=fragment, seq=seq, fate=fate,
            version=self.versions[fragment], reason=reason, drop_outstanding=drop,
        )  # fmt: skip
        return self.receipts[key]

    def _say(self, **what: Any) -> None:
        self.log.append(pb.Notification(log=self.epoch, sequence=len(self.log) + 1, **what))
        self._news.notify_all()

    def _serve(self, address: str) -> None:
        self._gate.set()
        self._server = grpc.server(ThreadPoolExecutor(48), options=[("grpc.so_reuseport", 0)])
        rpc.add_OuterServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(address)}"
        self._server.start()


def _refuse(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> None:
    """Refuses a call with a core's trailing metadata."""
    context.set_trailing_metadata(ATOLL_STATUS)
    context.abort(code, details)


@contextmanager
def fake_core(fragments: int = 2) -> Iterator[FakeCore]:
    """Context manager for a core that serves until the block ends."""
    core = FakeCore(fragments)
    try:
        yield core
    finally:
        core.epoch += 1
        core.go_on()
        core.stop()
