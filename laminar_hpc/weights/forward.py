"""What a relay does with versions: it fetches them from the one before it and serves them to the one after it.

Rules

* Broadcasts are carried out one after another, in the order of their versions; none is skipped, so the relay after this
  one finds here every version that it is told to fetch.
* A relay **borrows** a version from the one before it, as a rollout does: the upstream relay holds the version, in the
  downstream relay's name, from the moment it begins to fetch it itself until the downstream relay, having all chunks
  complete and checked, sends a `LeaseReturn`. Until then the slot is not reused, so a chunk can be asked for again.
* The trainers hold a version until the controller's `Release`, which follows from the first relay's completion.

Why this never waits in a circle: a relay that has no slot for a version waits for leases on older ones, held by rollouts,
who give them back when they have loaded, or by the relay after it. That one waits for chunks of an older version, which
this relay has or is fetching, or, in turn, for leases further down the chain. The last relay waits for rollouts alone.

What is not covered: a rank that is lost. Its leases are dropped with `Image.drop_borrower`; the chain is not repaired here.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

from laminar_hpc.errors import ProtocolError
from laminar_hpc.mpi.transport import Transport
from laminar_hpc.protocol.commands import Broadcast
from laminar_hpc.protocol.peer import DIGEST_BYTES, ChunkRequest, LeaseReturn, Manifest
from laminar_hpc.weights.fetch import Fetch, SendMail
from laminar_hpc.weights.image import Image
from laminar_hpc.weights.reshard import check_shares
from laminar_hpc.weights.serve import ChunkServer


class Held(NamedTuple):
    """A version that a relay has complete: how long it took since `start`, and how long the image is."""

    version: int
    seconds: float
    nbytes: int


class _Task(NamedTuple):
    broadcast: Broadcast
    started_s: float
    upstream: int | None
    downstream: int | None


class Forwarder:
    """One relay: its image, the version it is fetching, the requests it serves."""

    def __init__(
        self,
        transport: Transport,
        manifest: Manifest,
        send_mail: SendMail,
        *,
        window: int,
        slots: int,
        verify: bool,
    ) -> None:
        """`window`, `slots` and `verify` are as in the config's section `weights`."""
        self.image = Image.create(manifest.nbytes, slots)
        self._transport = transport
        self._manifest = manifest
        self._send_mail = send_mail
        self._window = window
        self._verify = verify
        self._server = ChunkServer(transport, self.image, manifest, 0, manifest.chunks)
        self._tags = itertools.cycle(range(transport.tags))
        self._last: int | None = None
        self._queue: deque[_Task] = deque()  # the first one is being fetched if there is a fetch
        self._fetch: Fetch | None = None
        self.moved = False
        """Whether the last `poll` moved anything; where it did not, a caller may pause before the next one."""

    @property
    def busy(self) -> bool:
        """Whether chunks are on their way, in or out."""
        return self._fetch is not None or self._server.sending

    @property
    def waiting_for(self) -> str:
        """What it waits for and from whom, for people; "" when no broadcast is under way."""
        if self._fetch is not None:
            return self._fetch.waiting_for
        return f"a slot for version {self._queue[0].broadcast.version}: {self.image.describe()}" if self._queue else ""

    def start(self, broadcast: Broadcast, now: float) -> None:
        """Fetch `broadcast.version` when its turn has come; `now` in seconds. Versions have to come in order."""
        rank, version, chain = self._transport.rank, broadcast.version, broadcast.chain
        if rank not in chain or len(set(chain)) != len(chain):
            raise ProtocolError(f"relay rank {rank}: broadcast of version {version} has the chain {chain}")
        if self._last is not None and version <= self._last:
            raise ProtocolError(f"relay rank {rank}: broadcast of version {version} after that of {self._last}")
        if len(broadcast.digests) != self._manifest.chunks * DIGEST_BYTES:
            raise ProtocolError(
                f"relay rank {rank}: broadcast of version {version} has {len(broadcast.digests)} bytes of digests, "
                f"{self._manifest.chunks * DIGEST_BYTES} are right for {self._manifest.chunks} chunks"
            )
        check_shares(broadcast.shares, self._manifest.chunks)
        place = chain.index(rank)
        upstream = chain[place - 1] if place > 0 else None
        downstream = chain[place + 1] if place + 1 < len(chain) else None
        self._last = version
        self._queue.append(_Task(broadcast, now, upstream, downstream))

    def serve(self, request: ChunkRequest) -> None:
        """Answer the next relay's `request` now or as soon as its chunk is here."""
        self._server.ask(request)

    def poll(self, now: float) -> list[Held]:
        """Move on, without waiting; the versions that have become complete."""
        held: list[Held] = []
        self.moved = False
        while self._queue and self._advance():
            task = self._queue.popleft()
            self._fetch = None
            held.append(Held(task.broadcast.version, now - task.started_s, self._manifest.nbytes))
        self.moved |= self._server.poll(self._written)
        return held

    def stop(self) -> bool:
        """Give up what is under way, for good; False while a receive cannot be taken back yet, then call again."""
        if self._fetch is not None and not self._fetch.stop():
            return False
        self._queue.clear()
        self._fetch = None
        return True

    def close(self) -> None:
        """Stop, and give the memory up: it is freed when no rollout reads from it and no transfer writes to it any more."""
        self.stop()
        self.image.close()

    def _advance(self) -> bool:
        """Work on the first broadcast; True when its version is complete."""
        task = self._queue[0]
        version = task.broadcast.version
        if self._fetch is None and not self._begin(task):
            return False
        assert self._fetch is not None
        self.moved |= self._fetch.poll()
        if not self._fetch.complete:
            return False
        self.image.complete(version)
        if task.upstream is not None:
            self._send_mail(task.upstream, LeaseReturn(rank=self._transport.rank, version=version))
        return True

    def _begin(self, task: _Task) -> bool:
        version = task.broadcast.version
        buffer = self.image.begin_fill(version)
        if buffer is None:
            return False
        if task.downstream is not None:
            self.image.hold(task.downstream, version)
        self._fetch = Fetch(
            self._transport,
            self._manifest,
            task.broadcast,
            task.upstream,
            buffer,
            send_mail=self._send_mail,
            tags=self._tags,
            window=self._window,
            verify=self._verify,
        )
        return True

    def _written(self, version: int, chunk: int) -> bool:
        return self._fetch is not None and self._fetch.version == version and self._fetch.has(chunk)
