"""Records to bytes and back: MessagePack with a type tag, decoded strictly, so that no message can run code."""

from __future__ import annotations

import msgspec

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.commands import AnyCommand
from laminar_hpc.protocol.events import AnyEvent
from laminar_hpc.protocol.peer import AnyMessage

AnyRecord = AnyEvent | AnyCommand | AnyMessage

_encoder = msgspec.msgpack.Encoder()
_records: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def encode(record: AnyRecord) -> bytes:
    """The record as bytes."""
    return _encoder.encode(record)


def decode(data: bytes | memoryview) -> AnyRecord:
    """The record in these bytes; ProtocolError where they hold none."""
    try:
        return _records.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{len(data)} bytes that are no known message: {error}") from error
