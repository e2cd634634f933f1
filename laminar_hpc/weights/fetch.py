"""Fetching one version, chunk by chunk, driven by the receiver."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.errors import PeerLost, ProtocolError
from laminar_hpc.mpi.transport import Receive, Transport, has_ended
from laminar_hpc.protocol.peer import ChunkGone, ChunkRequest, ChunkSent, Manifest
from laminar_hpc.weights.digest import Hasher
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.scatter import contiguous, scatter
from laminar_hpc.weights.serve import SendMail
from laminar_hpc.weights.sources import Part, Sources

MAX_RETRIES = 3
"""How often a chunk with a wrong digest is asked for again."""


class _Asked:
    """A part of a chunk that has been asked for and is not there yet."""

    def __init__(self, chunk: int, part: Part, buffer: NDArray[np.uint8], transfer: Receive) -> None:
        self.chunk = chunk
        self.part = part
        self.buffer = buffer
        self.transfer = transfer
        self.arrived = False
        self.digest: Future[bytes] | None = None
        """Of what has arrived, where it is checked."""


class Fetch:
    """The chunks of a version, from `sources`, into `buffer` (uint8, the whole image).

    At most `window` chunks are asked for and not there yet. The receive is posted before the request is sent, right where
    the bytes belong; parts that are no one run of the image go through memory of their own. All relays take the chunks in
    one `order`, so that a relay has early what the next one asks for early.

    The sources may change on the way (`turn_to`): what is there stays, what was asked of those that still live may still
    come, and the rest is asked of the new ones.
    """

    def __init__(
        self,
        transport: Transport,
        manifest: Manifest,
        version: int,
        sources: Sources,
        buffer: NDArray[np.uint8],
        *,
        order: Iterable[int],
        send_mail: SendMail,
        window: int,
        hasher: Hasher | None,
        epochs: Epochs,
        now: float,
    ) -> None:
        """Without a `hasher` nothing is checked; `epochs` are this rank's."""
        self.version = version
        self.gone = False
        """Whether a source has said that it will never have this version."""
        self._transport = transport
        self._manifest = manifest
        self._sources = sources
        self._buffer = buffer
        self._send_mail = send_mail
        self._window = window
        self._hasher = hasher
        self._epochs = epochs
        self._to_ask = deque(order)
        self._asked: list[_Asked] = []
        self._left_behind: list[_Asked] = []
        """Asked of a source that is none any more; the transport may still write to its buffer."""
        self._parts: dict[int, int] = {}  # chunks asked for: how many parts are still to come
        self._attempts: dict[int, int] = {}
        self._digests: dict[int, bytes] = {}
        self._sealing: dict[int, Future[bytes]] = {}  # chunks that are there, but for their digests
        self._told: dict[tuple[int, int], bytes] = {}  # (source, chunk): the digest that the source has announced
        self._lost: set[int] = set()
        self._borrowed: set[int] = set()
        self._staging: list[NDArray[np.uint8]] = []
        self._moved_s = now

    @property
    def complete(self) -> bool:
        """Whether all chunks are there."""
        return len(self._digests) == self._manifest.chunks

    def done_with(self) -> set[int]:
        """Of a fetch that is over: the ranks that hold the version for this one and do so no longer for anything; once each.

        A source that answers a request lends the version with it, so none of whom something is still asked.
        """
        pending = {asked.part.source for asked in [*self._asked, *self._left_behind]}
        done = self._borrowed - pending
        self._borrowed &= pending
        return done

    @property
    def digests(self) -> dict[int, bytes]:
        """The digests of the chunks that are there ("" where they are not checked)."""
        return self._digests

    @property
    def waiting_for(self) -> str:
        """What it waits for and from whom, for people."""
        chunks = ", ".join(f"{asked.chunk} from rank {asked.part.source}" for asked in self._asked)
        lost = ", ".join(f"rank {rank}" for rank in sorted(self._lost & self._sources.ranks))
        source = f"a source for version {self.version}{f' in place of {lost}' if lost else ''}"
        return f"chunk {chunks} of version {self.version}" if chunks else source

    def has(self, chunk: int) -> bool:
        """Whether `chunk` is there and right."""
        return chunk in self._digests

    def stalled_on(self, now: float, timeout_s: float) -> int | None:
        """A source that has sent nothing for `timeout_s` though asked, or that the transport has lost; once in that time."""
        sources = [asked.part.source for asked in self._asked] or sorted(self._lost & self._sources.ranks)
        if not sources or now - self._moved_s < timeout_s:
            return None
        self._moved_s = now
        return sources[0]

    def poll(self, now: float) -> bool:
        """Take what has arrived, ask for more; whether there was anything to do."""
        moved = False
        for asked in self._asked[:]:
            if self._look_at(asked):
                moved = True
        for chunk, digest in list(self._sealing.items()):
            if digest.done():
                self._digests[chunk] = self._sealing.pop(chunk).result()
                moved = True
        while (
            self._to_ask and len(self._parts) < self._window and not self.gone and not self._lost & self._sources.ranks
        ):
            self._ask(self._to_ask.popleft())
            moved = True
        if moved:
            self._moved_s = now
        return moved

    def sent(self, message: ChunkSent) -> None:
        """A source says that it has sent a chunk, with this digest."""
        if any(asked.chunk == message.chunk and asked.part.source == message.rank for asked in self._asked):
            self._told[message.rank, message.chunk] = message.digest

    def refused(self, message: ChunkGone) -> None:
        """A source will never have what was asked of it."""
        for asked in [*self._asked, *self._left_behind]:
            if asked.chunk != message.chunk or asked.part.source != message.rank:
                continue
            if not asked.transfer.cancel():  # it is an earlier question that is being answered
                self._leave_behind(asked)
            elif asked in self._asked:
                self._asked.remove(asked)
            else:
                self._left_behind.remove(asked)
        self._forget_chunk(message.chunk)
        self.gone |= message.rank in self._sources.ranks

    def forget(self, rank: int) -> None:
        """`rank` is gone: nothing more comes from it."""
        self._lost.add(rank)
        self._borrowed.discard(rank)
        for asked in self._asked[:]:
            if asked.part.source == rank:
                self._leave_behind(asked)
        if rank in self._sources.ranks:  # chunks of which it had not been asked for its part yet
            for chunk in list(self._parts):
                self._forget_chunk(chunk)

    def turn_to(self, sources: Sources, now: float) -> None:
        """Take what is still missing from other sources."""
        self._sources = sources
        self._moved_s = now
        self._lost.clear()  # whoever names a source knows of its losses
        self.gone = False
        for asked in self._asked[:]:
            if asked.part.source not in sources.ranks:
                self._leave_behind(asked)

    def stop(self) -> None:
        """Ask for nothing more. What has been asked for may still come, and is waited for with `quiet`."""
        for asked in self._asked[:]:
            self._leave_behind(asked)
        self._to_ask.clear()

    def cancel(self) -> None:
        """Stop, and take back what has been asked for: those who were asked will not answer."""
        self.stop()
        for asked in self._left_behind:
            asked.transfer.cancel()

    @property
    def quiet(self) -> bool:
        """Whether nobody writes to the buffer any more. Only then may it be used for something else."""
        for asked in self._left_behind[:]:
            if has_ended(asked.transfer):
                self._left_behind.remove(asked)
        return not self._left_behind and not self._asked

    # --- one chunk --------------------------------------------------------------------------------------------------

    def _ask(self, chunk: int) -> None:
        parts = self._sources.parts(chunk)
        self._parts[chunk] = len(parts)
        if not parts:
            self._complete(chunk)
        for part in parts:
            buffer = contiguous(self._buffer, part.spots)
            if buffer is None:
                buffer = self._staging_memory(part.nbytes)
            transfer = self._transport.receive(part.source, buffer)
            self._asked.append(_Asked(chunk, part, buffer, transfer))
            self._borrowed.add(part.source)
            epoch = self._epochs[part.source]
            self._send_mail(
                part.source, ChunkRequest(self._transport.rank, self.version, chunk, transfer.ticket, epoch)
            )

    def _staging_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory that no other part uses now; registered once and kept."""
        used = {id(asked.buffer.base) for asked in [*self._asked, *self._left_behind]}
        for memory in self._staging:
            if id(memory) not in used and memory.nbytes >= nbytes:
                return memory[:nbytes]
        memory = np.empty(max(nbytes, min(self._manifest.chunk_bytes, self._manifest.nbytes)), dtype=np.uint8)
        self._transport.register(memory)
        self._staging.append(memory)
        return memory[:nbytes]

    def _look_at(self, asked: _Asked) -> bool:
        """Take a part that is there; whether there was anything new about it."""
        if not asked.arrived:
            try:
                asked.arrived = asked.transfer.done()
            except PeerLost:
                self.forget(asked.part.source)
                return True
            if not asked.arrived:
                return False
            if self._hasher is not None:
                asked.digest = self._hasher.digest(asked.buffer)
        if asked.digest is None:
            self._take(asked, b"")
            return True
        expected = asked.part.digest
        if self._sources.digests_come:
            told = self._told.get((asked.part.source, asked.chunk))
            if told is None:
                return False
            expected = told
        if not asked.digest.done():
            return False
        self._told.pop((asked.part.source, asked.chunk), None)
        if asked.digest.result() == expected:
            self._take(asked, expected)
        else:
            self._asked.remove(asked)
            self._ask_again(asked.chunk, asked.part)
        return True

    def _take(self, asked: _Asked, digest: bytes) -> None:
        """A part is there and right; `digest` is "" where nothing is checked."""
        self._asked.remove(asked)
        chunk, part = asked.chunk, asked.part
        if contiguous(self._buffer, part.spots) is None:
            scatter(asked.buffer, part.spots, self._buffer)
        self._parts[chunk] -= 1
        if self._parts[chunk] == 0:
            low, high = self._manifest.chunk_range(chunk)
            self._complete(chunk, digest if part.nbytes == high - low else b"")

    def _complete(self, chunk: int, digest: bytes = b"") -> None:
        """All parts of a chunk are there; `digest` is the chunk's where it is known already."""
        del self._parts[chunk]
        if self._hasher is not None and not digest:
            low, high = self._manifest.chunk_range(chunk)
            self._sealing[chunk] = self._hasher.digest(self._buffer[low:high])
        else:
            self._digests[chunk] = digest

    def _ask_again(self, chunk: int, part: Part) -> None:
        attempts = self._attempts[chunk] = self._attempts.get(chunk, 0) + 1
        if attempts > MAX_RETRIES:
            raise ProtocolError(
                f"rank {self._transport.rank}: chunk {chunk} of version {self.version} came from rank {part.source} with a "
                f"wrong digest {attempts} times"
            )
        self._forget_chunk(chunk)

    def _leave_behind(self, asked: _Asked) -> None:
        """Its chunk is asked for again; its buffer is not free until its transfer has ended."""
        if asked not in self._asked:
            return  # with another part of its chunk
        self._asked.remove(asked)
        self._told.pop((asked.part.source, asked.chunk), None)
        if not asked.arrived:
            self._left_behind.append(asked)
        self._forget_chunk(asked.chunk)

    def _forget_chunk(self, chunk: int) -> None:
        """Ask for a chunk from the start, all its parts."""
        if self._parts.pop(chunk, None) is not None:
            self._to_ask.appendleft(chunk)
            for asked in [asked for asked in self._asked if asked.chunk == chunk]:
                self._leave_behind(asked)
