"""The channel between a driver and its worker: whole messages, any size, and no way to wait for each other."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.errors import ProtocolError
from laminar_hpc.process.channel import LENGTH_BYTES, MAX_BYTES, Channel, ChannelClosed, wait_any
from laminar_hpc.protocol.peer import Goodbye, Graded, PromptEncoded

DEADLINE_S = 20.0


def ends() -> tuple[Channel, Channel]:
    """A driver's end and a worker's end."""
    driver, stream = Channel.pair()
    return driver, Channel(stream, waits=True)


def encoded(number: int, nbytes: int) -> PromptEncoded:
    return PromptEncoded(number, bytes([number % 251]) * nbytes)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 300_000), max_size=8))
def test_messages_arrive_whole_and_in_order(sizes: list[int]) -> None:
    driver, worker = ends()
    messages = [encoded(number, nbytes) for number, nbytes in enumerate(sizes)]
    for message in messages:
        driver.send(message)
    received: list[object] = []
    while len(received) < len(messages):
        received += worker.receive_all()
        assert driver.receive() is None  # works its outbox off
    assert received == messages
    assert not driver.stalled


def test_a_driver_never_waits_for_a_worker_that_does_not_read() -> None:
    driver, worker = ends()
    large = 40 * [encoded(1, 500_000)]
    answers = 40 * [encoded(2, 500_000)]

    def work() -> None:
        for answer in answers:  # says all it has to say before it reads
            worker.send(answer)
        for message in large:
            assert worker.receive(DEADLINE_S) == message

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for message in large:
        driver.send(message)  # with a driver that waits, both would wait here for ever
    assert driver.stalled
    received: list[object] = []
    while driver.stalled or len(received) < len(answers):
        wait_any([driver], DEADLINE_S)
        received += driver.receive_all()
    assert received == answers
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_nothing_there_is_none_and_does_not_wait() -> None:
    driver, worker = ends()
    assert driver.receive() is None
    assert worker.receive(0.0) is None
    assert wait_any([driver], 0.0) == []


def test_what_was_said_before_the_end_is_read_first() -> None:
    driver, worker = ends()
    driver.send(Goodbye(1))  # never read
    worker.send(Graded(7, 1.0, ""))
    worker.send(Goodbye(2))
    worker.close()
    with pytest.raises(ChannelClosed):
        driver.send(Goodbye(3))
    assert driver.receive_all() == [Graded(7, 1.0, ""), Goodbye(2)]
    with pytest.raises(ChannelClosed):
        driver.receive_all()


def test_a_closed_end_says_so() -> None:
    driver, worker = ends()
    driver.close()
    with pytest.raises(ChannelClosed):
        driver.receive()
    with pytest.raises(ChannelClosed):
        worker.receive(None)


def test_an_absurd_length_is_refused() -> None:
    driver, stream = Channel.pair()
    stream.sendall((MAX_BYTES + 1).to_bytes(LENGTH_BYTES, "little"))
    with pytest.raises(ProtocolError, match=f"a message of {MAX_BYTES + 1} bytes"):
        driver.receive()


def test_bytes_that_are_no_message_are_refused() -> None:
    driver, stream = Channel.pair()
    stream.sendall((3).to_bytes(LENGTH_BYTES, "little") + b"\x81\xa1x")
    with pytest.raises(ProtocolError):
        driver.receive()
