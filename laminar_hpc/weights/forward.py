"""What a relay does with versions: it fetches them from the one before it and serves them to the one after it.

Rules

* Versions are fetched one after another. Of those that wait behind the one under way only the newest is kept. A relay that
  asks for one that was passed over here is told that it is gone, and goes on with the newest too.
* A relay **borrows** a version from the one before it, as a rollout does: the upstream relay holds the version, in the
  downstream relay's name, from the first chunk that it sends until the downstream relay has all chunks complete and
  checked, or has given up, and says so with a `LeaseReturn`. Until then the slot is not reused, so a chunk can be asked for
  again. The master borrows from the trainers in the same way.
* A broadcast of a version that is under way already, with another chain, changes where the missing chunks come from.
* A relay whose source is lost keeps what it has and waits for the new chain.

Why this never waits in a circle: a relay that has no slot for a version waits for leases on older ones, held by rollouts,
who give them back when they have loaded, or by the relay after it. That one waits for chunks of an older version, which
this relay has, is fetching or refuses, or, in turn, for leases further down the chain. The last relay waits for rollouts
alone. The leases of a rank that is lost are void. A slot whose chunk broke off in the middle is not waited for, for long:
another one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from laminar_hpc.errors import ProtocolError
from laminar_hpc.mpi.transport import Transport
from laminar_hpc.protocol.commands import Broadcast
from laminar_hpc.protocol.peer import ChunkGone, ChunkRequest, ChunkSent, Layout
from laminar_hpc.weights.digest import image_digest
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.fetch import Fetch
from laminar_hpc.weights.fetches import Fetches
from laminar_hpc.weights.image import Image
from laminar_hpc.weights.reshard import chunk_order
from laminar_hpc.weights.serve import ChunkServer, Holdings, SendMail
from laminar_hpc.weights.sources import Cut, FromRelay, FromTrainers, Sources, cut_layout


class Held(NamedTuple):
    """A version that a relay has complete: how long it took since `start`, how long the image is, and its digest."""

    version: int
    seconds: float
    nbytes: int
    digest: bytes


class _Task(NamedTuple):
    broadcast: Broadcast
    started_s: float


class Forwarder:
    """One relay: its image, the version it is fetching, the requests it serves."""

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        send_mail: SendMail,
        *,
        window: int,
        slots: int,
        verify: bool,
        epochs: Epochs | None = None,
        has_room: Callable[[int], bool] = lambda _nbytes: True,
    ) -> None:
        """`window`, `slots` and `verify` are as in the config's section `weights`.

        `epochs` are the rank's (None: no losses); its owner tells them of losses before it calls `forget` or `begin_anew`.
        `has_room` says whether the node can spare so many bytes.
        """
        self.image = Image.create(layout.manifest.nbytes, slots)
        self.skipped: list[int] = []
        """Versions that were passed over for newer ones, or given up; whoever reads them may clear the list."""
        self.moved = False
        """Whether the last `poll` moved anything; where it did not, a caller may pause before the next one."""
        self._transport = transport
        self._layout = layout
        self._manifest = layout.manifest
        self._cuts: list[Cut] | None = None
        self._order = chunk_order(layout.manifest, layout.shards)
        self._verify = verify
        self._digests: dict[int, dict[int, bytes]] = {}  # of each version here: of its chunks that are here
        holdings = Holdings(self._place, self._written, self._will_come, self._digest if verify else None)
        epochs = epochs or Epochs()
        self._server = ChunkServer(transport, self.image, send_mail, holdings, epochs)
        self._fetches = Fetches(
            transport,
            self.image,
            layout.manifest,
            send_mail,
            window=window,
            verify=verify,
            epochs=epochs,
            has_room=has_room,
        )
        self._told = -1
        self._now: _Task | None = None
        self._next: _Task | None = None

    @property
    def busy(self) -> bool:
        """Whether chunks are on their way, in or out."""
        return self._fetches.under_way is not None or self._server.sending

    @property
    def arrived(self) -> tuple[int, int] | None:
        """The version under way and how many of its chunks are here; None where none is under way."""
        fetch = self._fetches.under_way
        return None if fetch is None else (fetch.version, len(fetch.digests))

    @property
    def waiting_for(self) -> str:
        """What it waits for and from whom, for people; "" when no broadcast is under way."""
        if self._fetches.under_way is not None:
            return self._fetches.under_way.waiting_for
        return self._fetches.waiting_for_slot(self._now.broadcast.version) if self._now else ""

    # --- what others say --------------------------------------------------------------------------------------------

    def start(self, broadcast: Broadcast, now: float) -> None:
        """Fetch `broadcast.version` when its turn has come, or go on with it along another chain; `now` in seconds."""
        version, chain = broadcast.version, broadcast.chain
        if self._transport.rank not in chain or len(set(chain)) != len(chain):
            raise ProtocolError(
                f"relay rank {self._transport.rank}: broadcast of version {version} has the chain {chain}"
            )
        if self._now is not None and version == self._now.broadcast.version:
            self._now = _Task(broadcast, self._now.started_s)
            if self._fetches.under_way is not None:
                self._fetches.under_way.turn_to(self._sources(broadcast), now)
        elif self._next is not None and version == self._next.broadcast.version:
            self._next = _Task(broadcast, self._next.started_s)
        elif version > self._told:
            self._told = version
            if self._now is None:
                self._now = _Task(broadcast, now)
            else:
                if self._next is not None:
                    self.skipped.append(self._next.broadcast.version)
                self._next = _Task(broadcast, now)
        # else it is here, or was given up for a newer one

    def drop(self, version: int) -> None:
        """Give `version` up where it is not complete."""
        if self._next is not None and self._next.broadcast.version == version:
            self._next = None
            self.skipped.append(version)
        elif self._now is not None and self._now.broadcast.version == version:
            self._give_up()
        self._told = max(self._told, version)

    def serve(self, request: ChunkRequest) -> None:
        """Answer the next relay's, or a rollout's, `request` now or as soon as its chunk is here."""
        self._server.ask(request)

    def sent(self, message: ChunkSent) -> None:
        """The one before this one says what it has sent."""
        self._fetches.sent(message)

    def refused(self, message: ChunkGone) -> None:
        """The one before this one will never have a chunk."""
        self._fetches.refused(message)

    def forget(self, rank: int) -> None:
        """`rank` is gone. Call it after the transport's own `forget`."""
        self._server.forget(rank)
        self._fetches.forget(rank)

    def begin_anew(self, readers: Collection[int]) -> None:
        """The others have gone on without this rank: what it has and what it asked for is void.

        Call it after the transport's `forget` of all other ranks: they have ended what they had with this one.
        The memory stays, and what `readers`, the rollouts that map it, have leased of it stays until they give it back.
        """
        self._fetches.cancel()
        self._now = self._next = None
        self._told = -1
        self._server.begin_anew()
        self.image.void(readers)

    def stalled_on(self, now: float, timeout_s: float) -> tuple[int, int] | None:
        """Version and source of a fetch in which nothing has come for `timeout_s`, once in that time."""
        fetch = self._fetches.under_way
        source = None if fetch is None else fetch.stalled_on(now, timeout_s)
        return None if fetch is None or source is None else (fetch.version, source)

    # --- turns ------------------------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Held]:
        """Move on, without waiting; the versions that have become complete."""
        held: list[Held] = []
        self.moved = False
        while self._now is not None and self._advance(now):
            held.append(self._finish(self._now, now))
        self._fetches.let_go()
        self.moved |= self._server.poll()
        return held

    def close(self) -> None:
        """Give the memory up: it is freed when no rollout reads from it and no transfer writes to it any more."""
        self._now = self._next = None
        self._fetches.close()
        self.image.close()

    def _advance(self, now: float) -> bool:
        """Work on the version whose turn it is; True when it is complete."""
        assert self._now is not None
        fetch = self._fetches.under_way or self._begin(self._now.broadcast, now)
        if fetch is None:
            return False
        self.moved |= fetch.poll(now)
        if fetch.gone:
            self._give_up()
            return False
        return fetch.complete

    def _begin(self, broadcast: Broadcast, now: float) -> Fetch | None:
        fetch = self._fetches.begin(broadcast.version, self._sources(broadcast), self._order, now)
        if fetch is not None:
            kept = set(self.image.versions)
            self._digests = {version: digests for version, digests in self._digests.items() if version in kept}
            self._digests[broadcast.version] = fetch.digests
        return fetch

    def _finish(self, task: _Task, now: float) -> Held:
        version = task.broadcast.version
        self._fetches.complete()
        digest = b""
        if self._verify:
            digests = self._digests[version]
            digest = image_digest(b"".join(digests[chunk] for chunk in range(self._manifest.chunks)))
        self._now, self._next = self._next, None
        return Held(version, now - task.started_s, self._manifest.nbytes, digest)

    def _give_up(self) -> None:
        """On with the next one, where there is one."""
        assert self._now is not None
        self.skipped.append(self._now.broadcast.version)
        self._fetches.give_up()
        self._now, self._next = self._next, None

    # --- what it has ------------------------------------------------------------------------------------------------

    def _sources(self, broadcast: Broadcast) -> Sources:
        place = broadcast.chain.index(self._transport.rank)
        if place == 0:
            if self._cuts is None:  # a relay that is never the master has no use for them
                self._cuts = cut_layout(self._layout)
            return FromTrainers(self._cuts, broadcast.shares, self._manifest)
        return FromRelay(broadcast.chain[place - 1], self._manifest)

    def _place(self, chunk: int) -> tuple[int, int] | None:
        return self._manifest.chunk_range(chunk) if 0 <= chunk < self._manifest.chunks else None

    def _written(self, version: int, chunk: int) -> bool:
        fetch = self._fetches.under_way
        return fetch is not None and fetch.version == version and fetch.has(chunk)

    def _will_come(self, version: int) -> bool:
        """Whether a version that is not here may be: it is this relay's turn to fetch it, or nobody has told of it yet."""
        tasks = [task.broadcast.version for task in (self._now, self._next) if task is not None]
        return version in tasks or version > self._told

    def _digest(self, version: int, chunk: int) -> bytes:
        return self._digests[version][chunk]
