"""Fetching one version, chunk by chunk, driven by the receiver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.errors import ProtocolError
from laminar_hpc.mpi.transport import Transfer, Transport
from laminar_hpc.protocol.commands import Broadcast
from laminar_hpc.protocol.peer import DIGEST_BYTES, ChunkRequest, Manifest
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.weights.digest import chunk_digest

SendMail = Callable[[int, AnyRecord], None]
"""Sends a message to a rank, without waiting."""

MAX_RETRIES = 3
"""How often a chunk with a wrong digest is asked for again."""


class _Asked(NamedTuple):
    chunk: int
    source: int
    attempt: int  # 0 first
    transfer: Transfer


class Fetch:
    """The chunks of `broadcast`, from `upstream` or (None) from the trainers' shares, into `buffer`.

    At most `window` chunks are asked for and not there yet. Each is received where it belongs: the receive is posted
    before the request is sent. All relays take the chunks in one order, the trainers' shares in turn, so that all trainers
    send at once and a relay has early what the next one asks for early. `tags` yields tags that are free again long before
    they come round.
    """

    def __init__(
        self,
        transport: Transport,
        manifest: Manifest,
        broadcast: Broadcast,
        upstream: int | None,
        buffer: NDArray[np.uint8],
        *,
        send_mail: SendMail,
        tags: Iterator[int],
        window: int,
        verify: bool,
    ) -> None:
        self.version = broadcast.version
        self._transport = transport
        self._manifest = manifest
        self._digests = broadcast.digests
        self._buffer = buffer
        self._send_mail = send_mail
        self._tags = tags
        self._window = window
        self._verify = verify
        turns = sorted((turn, part.first_chunk, part.rank) for part in broadcast.shares for turn in range(part.chunks))
        self._to_ask = deque((first + turn, rank if upstream is None else upstream) for turn, first, rank in turns)
        self._asked: list[_Asked] = []
        self._has = np.zeros(manifest.chunks, dtype=np.bool_)
        self._lacking = manifest.chunks

    @property
    def complete(self) -> bool:
        """Whether all chunks are there."""
        return self._lacking == 0

    @property
    def waiting_for(self) -> str:
        """What it waits for and from whom, for people."""
        chunks = ", ".join(f"{asked.chunk} from rank {asked.source}" for asked in self._asked)
        return f"chunk {chunks} of version {self.version}"

    def has(self, chunk: int) -> bool:
        """Whether `chunk` is there and right."""
        return bool(self._has[chunk])

    def poll(self) -> bool:
        """Take what has arrived, ask for more; whether there was anything to do."""
        moved = False
        for asked in self._asked[:]:
            if asked.transfer.done():
                self._asked.remove(asked)
                self._take(asked)
                moved = True
        while self._to_ask and len(self._asked) < self._window:
            self._ask(*self._to_ask.popleft(), attempt=0)
            moved = True
        return moved

    def stop(self) -> bool:
        """Take back all receives; False while one of them cannot be, then call again."""
        self._to_ask.clear()
        self._asked = [asked for asked in self._asked if not asked.transfer.cancel()]
        return not self._asked

    def _ask(self, chunk: int, source: int, attempt: int) -> None:
        tag = next(self._tags)
        transfer = self._transport.receive(source, tag, self._bytes(chunk))
        self._asked.append(_Asked(chunk, source, attempt, transfer))
        self._send_mail(source, ChunkRequest(rank=self._transport.rank, version=self.version, chunk=chunk, tag=tag))

    def _take(self, asked: _Asked) -> None:
        if not self._verify or chunk_digest(self._bytes(asked.chunk)) == self._digest(asked.chunk):
            self._has[asked.chunk] = True
            self._lacking -= 1
        elif asked.attempt < MAX_RETRIES:
            self._ask(asked.chunk, asked.source, asked.attempt + 1)
        else:
            raise ProtocolError(
                f"relay rank {self._transport.rank}: chunk {asked.chunk} of version {self.version} came from rank "
                f"{asked.source} with a wrong digest {asked.attempt + 1} times"
            )

    def _bytes(self, chunk: int) -> NDArray[np.uint8]:
        low, high = self._manifest.chunk_range(chunk)
        return self._buffer[low:high]

    def _digest(self, chunk: int) -> bytes:
        return self._digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
