"""One end of the pipe between a driver and its worker: whole messages, never pickled, never waiting unasked."""

from __future__ import annotations

from multiprocessing.connection import Connection, wait

from laminar_hpc.protocol.wire import AnyRecord, decode, encode


class ChannelClosed(EOFError):
    """The other end is gone."""


class Channel:
    """Sends and receives protocol messages over a connection.

    `send` blocks only while the pipe is full, which lasts as long as the other side does not read; both sides read often.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, message: AnyRecord) -> None:
        """Send one message; ChannelClosed where nobody is left to read it."""
        try:
            self.connection.send_bytes(encode(message))
        except OSError as error:
            raise ChannelClosed("the other end of the pipe is closed") from error

    def receive(self, timeout_s: float | None = 0.0) -> AnyRecord | None:
        """The next message, or None where none came within `timeout_s` (None: wait for ever).

        Waiting for ever is for a worker with nothing else to do: the pipe closes when its driver is gone.
        """
        try:
            if not self.connection.poll(timeout_s):
                return None
            return decode(self.connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise ChannelClosed("the other end of the pipe is closed") from error

    def receive_all(self) -> list[AnyRecord]:
        """All messages that have arrived."""
        messages = []
        while (message := self.receive()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        """Close this end."""
        self.connection.close()


def wait_any(channels: list[Channel], timeout_s: float) -> None:
    """Return when one of the channels has something to read, or after `timeout_s`."""
    wait([channel.connection for channel in channels], timeout_s)
