"""Payloads stay uncompressed on short links that are faster than the compressor."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import termios
import threading
import time
from collections.abc import Iterator

import pytest
from atoll_wire.connections.link import Link
from atoll_wire.connections.link_speed import LOOK_S, SAVED, LinkSpeed, Measured, measured, port_of
from atoll_wire.connections.parallel_connections import FAR_S, FEWEST, NEWEST, STEADY_S
from atoll_wire.security.transport import TransportSecurity

from tests.clocks import SetClock


def test_a_link_is_fast_if_it_carries_more_than_the_compressor_saves():
    clock, kernel = SetClock(), {7070: Measured(0.9 * SAVED)}
    speed = LinkSpeed(7070, clock, kernel.__getitem__)
    assert not speed.exceeds_compressor
    kernel[7070] = Measured(1.1 * SAVED)
    assert not speed.exceeds_compressor, "the kernel is not asked again within LOOK_S"
    clock.steady += 1.1 * LOOK_S
    assert speed.exceeds_compressor


def test_the_compressor_is_measured():
    clock = SetClock()
    speed = LinkSpeed(7070, clock, lambda _: Measured(SAVED / 2))

    def compress(content: bytes) -> bytes:
        clock.steady += 1.0  # saves SAVED / 4 bytes per second
        return bytes(len(content) - int(SAVED / 4))

    content = bytes(int(SAVED))
    assert not speed.exceeds_compressor
    for _ in range(20):
        assert [len(each) for each in speed.compressed([content], compress)] == [int(SAVED) - int(SAVED / 4)]
    assert speed.exceeds_compressor


def test_a_long_link_is_never_fast():
    clock = SetClock()
    link = Link("127.0.0.1:7070", TransportSecurity(), clock)
    link.speed = LinkSpeed(7070, clock, lambda _: Measured(10 * SAVED))
    assert link.fast
    for _ in range(FEWEST):
        link.answered(2 * FAR_S)
    assert not link.fast, "traffic over long links costs money"


@pytest.mark.parametrize(("kernel_s", "needed"), [(2 * FAR_S, 1), (None, FEWEST), (FAR_S / 100, NEWEST)])
def test_if_only_answers_take_long_the_processes_may_be_busy(kernel_s, needed):
    clock = SetClock()
    link = Link("127.0.0.1:7070", TransportSecurity(), clock)
    link.speed = LinkSpeed(7070, clock, lambda _: Measured(10 * SAVED, kernel_s))
    for _ in range(needed - 1):
        link.answered(2 * FAR_S)
    assert link.fast
    link.answered(2 * FAR_S)
    assert not link.fast, "behind a near proxy, the link may be long"


def test_a_near_link_that_became_long_is_noticed_after_a_few_seconds():
    clock = SetClock()
    link = Link("127.0.0.1:7070", TransportSecurity(), clock)
    link.speed = LinkSpeed(7070, clock, lambda _: Measured(10 * SAVED, FAR_S / 100))  # the kernel remembers the past
    for _ in range(NEWEST):
        link.answered(FAR_S / 10)
    for _ in range(FEWEST):
        assert link.fast
        clock.steady += STEADY_S / FEWEST
        link.answered(2 * FAR_S)
    assert not link.fast


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, int]]:
    """Opens a connection over loopback. Yields it and the port of the other side, which answers question marks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def receive() -> None:
            with server.accept()[0] as theirs:
                while data := theirs.recv(1 << 20):
                    if data == b"?":
                        theirs.sendall(b"!")

        receiver = threading.Thread(target=receive)
        receiver.start()
        with socket.create_connection(("127.0.0.1", port)) as mine:
            yield mine, port
        receiver.join()


def test_the_kernel_knows_the_rate_and_the_round_trip_of_loopback():
    with connected() as (mine, port):
        mine.sendall(bytes(32 << 20))
        assert measured(port).rate > SAVED
        assert measured(port).rate > SAVED, "the connection is still open after the first look"
        assert 0.0 < measured(port).round_trip_s < FAR_S
        assert measured(1) == Measured()
    assert measured(port) == Measured(), "the connection is closed"


def test_delayed_acknowledgements_do_not_make_loopback_a_long_link():
    """After a question and its answer, Linux delays an acknowledgement in the hope of another answer."""
    with connected() as (mine, port):
        for _ in range(20):
            mine.sendall(b"?")
            assert mine.recv(1) == b"!"
            mine.sendall(b".")
            while fcntl.ioctl(mine, termios.TIOCOUTQ, bytes(4)) != bytes(4):  # not acknowledged yet
                time.sleep(0.001)
        assert measured(port).round_trip_s < FAR_S


@pytest.mark.parametrize(
    ("address", "port"),
    [("core:7070", 7070), ("[::1]:7071", 7071), ("unix:/run/atoll:7070", None), ("hostile", None)],
)
def test_only_a_tcp_address_has_a_port(address, port):
    assert port_of(address) == port
