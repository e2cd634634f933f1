"""A rollout without a relay on its node: its driver fetches the image from a relay elsewhere, into memory of its own."""

from __future__ import annotations

from laminar_hpc.mpi.transport import Transport
from laminar_hpc.protocol.peer import ChunkGone, ChunkSent, Layout, Lease, LeaseReturn
from laminar_hpc.weights.digest import Hasher
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.fetch import Fetch, Shortage
from laminar_hpc.weights.image import Image, SlotState
from laminar_hpc.weights.serve import SendMail
from laminar_hpc.weights.sources import FromRelay

SLOTS = 2
"""One that the worker loads from, and one for a fetch that could not be stopped at once."""


class RemoteImage:
    """Versions fetched from other nodes, one at a time: idle > `begin` > fetching > (`poll` gives a lease) > `done` > idle."""

    def __init__(
        self, transport: Transport, layout: Layout, send_mail: SendMail, *, window: int, verify: bool, epochs: Epochs
    ) -> None:
        """`epochs` are this rank's, `window` and `verify` as in the config's section `weights`."""
        self._transport = transport
        self._layout = layout
        self._send_mail = send_mail
        self._window = window
        self._hasher = Hasher() if verify else None
        self._image: Image | None = None  # no memory is taken where none is needed
        self._fetch: Fetch | None = None
        self._stopped: list[Fetch] = []
        self._epochs = epochs
        self._wanted: tuple[int, int] | None = None
        self._ready: int | None = None
        self._shortage: Shortage | None = None

    @property
    def waiting_for(self) -> str:
        """What it waits for and from whom, for people; "" when nothing is under way."""
        if self._fetch is not None:
            return self._fetch.waiting_for
        return "" if self._wanted is None else f"memory for version {self._wanted[1]}"

    @property
    def gone(self) -> bool:
        """Whether the relay has said that it has not got the version any more: ask anew."""
        return self._fetch is not None and self._fetch.gone

    def begin(self, relay: int, version: int, now: float) -> None:
        """Fetch `version`, which `relay` has lent."""
        self._wanted = (relay, version)
        self._try_begin(now)

    def poll(self, now: float) -> Lease | None:
        """Move on; the lease for the worker when all chunks are here."""
        self._transport.poll()
        self._let_go()
        if self._wanted is not None:
            self._try_begin(now)
        if self._image is None:
            return None
        if self._fetch is not None:
            self._fetch.poll(now)
            if self._fetch.complete:
                self._image.complete(self._fetch.version)
                self._ready = self._fetch.version
                self._leave(self._fetch)
        version, self._ready = self._ready, None
        if version is None:
            return None
        self._image.hold(self._transport.rank, version)
        return self._image.lent(version)

    def done(self, version: int) -> None:
        """The worker has loaded `version`, or is gone."""
        me = self._transport.rank
        if self._image is not None and self._image.has_lent(me, version):
            self._image.give_back(me, version)

    def drop(self) -> None:
        """Give up what is under way."""
        self._wanted = self._ready = None
        if self._fetch is not None and self._image is not None:
            self._fetch.stop()
            self._image.drop(self._fetch.version)
            self._leave(self._fetch)

    def sent(self, message: ChunkSent) -> None:
        """The relay says what it has sent."""
        if self._fetch is not None and self._fetch.version == message.version:
            self._fetch.sent(message)

    def refused(self, message: ChunkGone) -> None:
        """The relay will never have a chunk."""
        for fetch in [*self._stopped, *([self._fetch] if self._fetch is not None else [])]:
            if fetch.version == message.version:
                fetch.refused(message)

    def forget(self, rank: int) -> None:
        """`rank` is gone."""
        for fetch in [*self._stopped, *([self._fetch] if self._fetch is not None else [])]:
            fetch.forget(rank)

    def start_over(self) -> None:
        """The others have taken this rank for gone: what it had asked of them never comes."""
        self.drop()
        for fetch in self._stopped:
            fetch.cancel()

    def close(self) -> None:
        """Give the memory up."""
        self.drop()
        if self._hasher is not None:
            self._hasher.close()
        if self._image is not None:
            self._image.close()
            self._image = None

    def _try_begin(self, now: float) -> None:
        assert self._wanted is not None
        relay, version = self._wanted
        manifest = self._layout.manifest
        if self._image is None or self._shortage is None:
            self._image = Image.create(manifest.nbytes, SLOTS)
            self._transport.register(self._image.memory)
            self._shortage = Shortage(self._image, self._transport)
        if self._image.state(version) is SlotState.READY:  # fetched for a worker that did not live to load it
            self._wanted, self._ready = None, version
            return
        buffer = self._image.begin_fill(version)
        if buffer is None:
            self._shortage.goes_on(len(self._stopped), now)
            return
        self._shortage.ended()
        self._wanted = None
        self._fetch = Fetch(
            self._transport,
            manifest,
            version,
            FromRelay(relay, manifest),
            buffer,
            order=range(manifest.chunks),
            send_mail=self._send_mail,
            window=self._window,
            hasher=self._hasher,
            epochs=self._epochs,
            now=now,
        )

    def _leave(self, fetch: Fetch) -> None:
        self._fetch = None
        if not fetch.quiet and self._image is not None:
            self._image.hold(self._transport.rank, fetch.version)
            self._stopped.append(fetch)

    def _let_go(self) -> None:
        for fetch in self._stopped[:]:
            if fetch.quiet and self._image is not None:
                self._stopped.remove(fetch)
                self._image.give_back(self._transport.rank, fetch.version)
                for rank in fetch.borrowed_from:  # who has answered a late request has lent the version anew
                    self._send_mail(rank, LeaseReturn(self._transport.rank, fetch.version))
