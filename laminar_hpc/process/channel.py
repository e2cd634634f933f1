"""The two ends of a stream between a driver and its worker: whole messages, never pickled, never waiting unasked.

A message is its length (8 bytes, little-endian) and its bytes. The driver's end never waits: what the stream has no room
for stays in an outbox, and goes out at the next call. The worker's end waits, both to send and, when asked, to receive.
So the two can never wait for each other: a worker that waits for room is read by a driver that has all its time.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.wire import AnyRecord, decode, encode

LENGTH_BYTES = 8
MAX_BYTES = 1 << 34
READ_BYTES = 1 << 18


class ChannelClosed(EOFError):
    """The other end is gone."""


class Channel:
    """One end. `Channel.pair` makes both."""

    def __init__(self, stream: socket.socket, waits: bool) -> None:
        """`waits` is true for the worker's end."""
        self._stream = stream
        self._waits = waits
        self._outbox: deque[memoryview] = deque()
        self._sending = threading.Lock()
        self._inbox = bytearray()

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """The driver's end, and the socket of which the worker makes its own end."""
        ours, theirs = socket.socketpair()
        return cls(ours, waits=False), theirs

    @property
    def stalled(self) -> bool:
        """Whether messages wait for room in the stream."""
        return bool(self._outbox)

    def fileno(self) -> int:
        """For `select`."""
        return self._stream.fileno()

    def send(self, message: AnyRecord) -> None:
        """Send one message, from any thread; ChannelClosed where nobody is left to read it."""
        data = encode(message)
        length = len(data).to_bytes(LENGTH_BYTES, "little")
        with self._sending:
            if len(data) <= READ_BYTES:  # one piece wakes the other end once
                self._outbox.append(memoryview(length + data))
            else:
                self._outbox += [memoryview(length), memoryview(data)]
            self._push()

    def receive(self, timeout_s: float | None = 0.0) -> AnyRecord | None:
        """The next message, or None where none came within `timeout_s` (None: wait for ever).

        Waiting for ever is for a worker with nothing else to do: the stream closes when its driver is gone. ChannelClosed
        where the other end is gone and all that it sent was received.
        """
        with self._sending:
            self._push(quietly=True)
        while (message := self._next()) is None:
            if not select_readable(self, timeout_s):
                return None
            self._pull()
        return message

    def receive_all(self) -> list[AnyRecord]:
        """All messages that have arrived; ChannelClosed where the other end is gone and there is none."""
        messages = []
        try:
            while (message := self.receive()) is not None:
                messages.append(message)
        except ChannelClosed:
            if not messages:
                raise
        return messages

    def close(self) -> None:
        """Close this end."""
        self._stream.close()

    def _push(self, quietly: bool = False) -> None:
        """Send what the stream has room for, all of it on an end that waits."""
        flags = 0 if self._waits else socket.MSG_DONTWAIT
        try:
            while self._outbox:
                sent = self._stream.send(self._outbox[0], flags)
                if sent < len(self._outbox[0]):
                    self._outbox[0] = self._outbox[0][sent:]
                else:
                    self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self._outbox.clear()
            if not quietly:  # what the other end said before it went can still be read
                raise ChannelClosed("the other end of the stream is closed") from error

    def _pull(self) -> None:
        try:
            data = self._stream.recv(READ_BYTES)
        except OSError as error:
            raise ChannelClosed("the stream is closed") from error
        if not data:
            raise ChannelClosed("the other end of the stream is closed")
        self._inbox += data

    def _next(self) -> AnyRecord | None:
        """The first message in the inbox, if it is there whole."""
        if len(self._inbox) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._inbox[:LENGTH_BYTES], "little")
        if length > MAX_BYTES:
            raise ProtocolError(f"a message of {length} bytes between driver and worker, {MAX_BYTES} are allowed")
        end = LENGTH_BYTES + length
        if len(self._inbox) < end:
            return None
        message = decode(bytes(self._inbox[LENGTH_BYTES:end]))
        del self._inbox[:end]
        return message


def select_readable(channel: Channel, timeout_s: float | None) -> bool:
    """Whether there is something to read, or the end of the stream, within `timeout_s`; an outbox is worked off meanwhile."""
    try:
        return bool(wait_any([channel], timeout_s))
    except ValueError as error:  # closed on this side
        raise ChannelClosed("the stream is closed") from error


def wait_any(channels: list[Channel], timeout_s: float | None) -> list[Channel]:
    """The channels that have something to read, as soon as there is one; none after `timeout_s`.

    It also returns, with none, when a channel's outbox can go on.
    """
    poller = select.poll()
    by_number = {}
    for channel in channels:
        by_number[channel.fileno()] = channel
        poller.register(channel.fileno(), select.POLLIN | (select.POLLOUT if channel.stalled else 0))
    found = poller.poll(None if timeout_s is None else 1000 * timeout_s)
    return [by_number[number] for number, event in found if event & ~select.POLLOUT]
