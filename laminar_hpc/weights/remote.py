"""A rollout without a relay on its node: its driver fetches the image from a relay elsewhere, into memory of its own."""

from __future__ import annotations

from collections.abc import Callable

from laminar_hpc.mpi.transport import Transport
from laminar_hpc.protocol.peer import ChunkGone, ChunkSent, Layout, Lease
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.fetches import Fetches
from laminar_hpc.weights.image import Image, SlotState
from laminar_hpc.weights.serve import SendMail
from laminar_hpc.weights.sources import FromRelay

SLOTS = 2
"""One that the worker loads from, and one for a fetch that could not be stopped at once."""


class RemoteImage:
    """Versions fetched from other nodes, one at a time: idle > `begin` > fetching > (`poll` gives a lease) > `done` > idle."""

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        send_mail: SendMail,
        *,
        window: int,
        verify: bool,
        epochs: Epochs,
        has_room: Callable[[int], bool] = lambda _nbytes: True,
    ) -> None:
        """`epochs` are this rank's, `window` and `verify` as in the config's section `weights`.

        `has_room` says whether the node can spare so many bytes.
        """
        self._transport = transport
        self._manifest = layout.manifest
        self._image = Image.create(layout.manifest.nbytes, SLOTS)  # no memory is taken before it is written to
        self._fetches = Fetches(
            transport,
            self._image,
            layout.manifest,
            send_mail,
            window=window,
            verify=verify,
            epochs=epochs,
            has_room=has_room,
        )
        self._wanted: tuple[int, int] | None = None
        self._ready: int | None = None

    @property
    def waiting_for(self) -> str:
        """What it waits for and from whom, for people; "" when nothing is under way."""
        if self._fetches.under_way is not None:
            return self._fetches.under_way.waiting_for
        return "" if self._wanted is None else self._fetches.waiting_for_slot(self._wanted[1])

    @property
    def gone(self) -> bool:
        """Whether the relay has said that it has not got the version any more: ask anew."""
        return self._fetches.under_way is not None and self._fetches.under_way.gone

    def begin(self, relay: int, version: int, now: float) -> None:
        """Fetch `version`, which `relay` has lent."""
        self._wanted = (relay, version)
        self._try_begin(now)

    def poll(self, now: float) -> Lease | None:
        """Move on; the lease for the worker when all chunks are here."""
        self._transport.poll()
        self._fetches.let_go()
        if self._wanted is not None:
            self._try_begin(now)
        fetch = self._fetches.under_way
        if fetch is not None:
            fetch.poll(now)
            if fetch.complete:
                self._fetches.complete()
                self._ready = fetch.version
        version, self._ready = self._ready, None
        if version is None:
            return None
        self._image.hold(self._transport.rank, version)
        return self._image.lent(version)

    def done(self, version: int) -> None:
        """The worker has loaded `version`, or is gone."""
        me = self._transport.rank
        if self._image.has_lent(me, version):
            self._image.give_back(me, version)

    def drop(self) -> None:
        """Give up what is under way."""
        self._wanted = self._ready = None
        self._fetches.give_up()

    def sent(self, message: ChunkSent) -> None:
        """The relay says what it has sent."""
        self._fetches.sent(message)

    def refused(self, message: ChunkGone) -> None:
        """The relay will never have a chunk."""
        self._fetches.refused(message)

    def forget(self, rank: int) -> None:
        """`rank` is gone."""
        self._fetches.forget(rank)

    def start_over(self) -> None:
        """The others have taken this rank for gone: what it had asked of them never comes."""
        self._wanted = self._ready = None
        self._fetches.cancel()

    def close(self) -> None:
        """Give the memory up."""
        self._fetches.close()
        self._image.close()

    def _try_begin(self, now: float) -> None:
        assert self._wanted is not None
        relay, version = self._wanted
        newest = self._image.newest
        if newest is not None and newest > version:  # from a relay that was ahead of this one: nobody reads it any more
            self._image.void({self._transport.rank})
        if self._image.state(version) is SlotState.READY:  # fetched for a worker that did not live to load it
            self._wanted, self._ready = None, version
        elif self._fetches.begin(version, FromRelay(relay, self._manifest), range(self._manifest.chunks), now):
            self._wanted = None
