"""All fetches into one image: the one under way, and those that are over but may still be written to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from laminar_hpc.mpi.transport import Transport
from laminar_hpc.protocol.peer import ChunkGone, ChunkSent, LeaseReturn, Manifest
from laminar_hpc.weights.digest import Hasher
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.fetch import Fetch
from laminar_hpc.weights.filling import Filling
from laminar_hpc.weights.image import Image, Pin
from laminar_hpc.weights.serve import SendMail
from laminar_hpc.weights.sources import Sources


class _Over(NamedTuple):
    """A fetch that is over, and the slot that somebody may still write to for it."""

    fetch: Fetch
    pin: Pin


class Fetches:
    """One version after another: `begin` > `under_way` > `complete` or `give_up`.

    What a fetch had asked for when it ended may still come. Its slot is pinned until then, and what it has borrowed goes back,
    source by source, when nothing more comes from there.
    """

    def __init__(
        self,
        transport: Transport,
        image: Image,
        manifest: Manifest,
        send_mail: SendMail,
        *,
        window: int,
        verify: bool,
        epochs: Epochs,
        has_room: Callable[[int], bool],
    ) -> None:
        """`has_room` is as for `Filling`, the rest as for `Fetch`."""
        self.under_way: Fetch | None = None
        self._transport = transport
        self._image = image
        self._filling = Filling(transport, image, has_room)
        self._manifest = manifest
        self._send_mail = send_mail
        self._window = window
        self._hasher = Hasher() if verify else None
        self._epochs = epochs
        self._over: list[_Over] = []

    def begin(self, version: int, sources: Sources, order: Iterable[int], now: float) -> Fetch | None:
        """Fetch `version`, its chunks in this `order`; None while there is no slot for it: ask again."""
        buffer = self._filling.begin(version, now)
        if buffer is None:
            return None
        self.under_way = Fetch(
            self._transport,
            self._manifest,
            version,
            sources,
            buffer,
            order=order,
            send_mail=self._send_mail,
            window=self._window,
            hasher=self._hasher,
            epochs=self._epochs,
            now=now,
        )
        return self.under_way

    def complete(self) -> None:
        """The version under way is there, all of it."""
        assert self.under_way is not None
        self._image.complete(self.under_way.version)
        self._leave(self.under_way)

    def give_up(self) -> None:
        """Stop the version under way, or the wait for a slot."""
        self._filling.stop_waiting()
        if self.under_way is not None:
            self.under_way.stop()
            self._image.drop(self.under_way.version)
            self._leave(self.under_way)

    def cancel(self) -> None:
        """Give up, and take back all that was asked for: those who were asked will not answer."""
        self.give_up()
        for over in self._over:
            over.fetch.cancel()

    def let_go(self) -> None:
        """Give back what the fetches that are over need no longer; to be called again and again."""
        for over in self._over[:]:
            self._return_leases(over.fetch)
            if over.fetch.quiet:
                self._over.remove(over)
                over.pin.release()
                self._return_leases(over.fetch)

    def waiting_for_slot(self, version: int) -> str:
        """What `version` waits for before it can begin, for people."""
        return self._filling.waiting_for(version)

    # --- what others say --------------------------------------------------------------------------------------------

    def sent(self, message: ChunkSent) -> None:
        """A source says what it has sent."""
        if self.under_way is not None and self.under_way.version == message.version:
            self.under_way.sent(message)

    def refused(self, message: ChunkGone) -> None:
        """A source will never have a chunk."""
        for fetch in self._all():
            if fetch.version == message.version:
                fetch.refused(message)

    def forget(self, rank: int) -> None:
        """`rank` is gone."""
        for fetch in self._all():
            fetch.forget(rank)

    def close(self) -> None:
        """Ask for nothing more, and end the threads that check digests."""
        if self.under_way is not None:
            self.under_way.stop()
            self.under_way = None
        if self._hasher is not None:
            self._hasher.close()

    # --- their parts ------------------------------------------------------------------------------------------------

    def _all(self) -> list[Fetch]:
        return [over.fetch for over in self._over] + ([self.under_way] if self.under_way is not None else [])

    def _leave(self, fetch: Fetch) -> None:
        self.under_way = None
        if not fetch.quiet:
            self._over.append(_Over(fetch, self._image.pin(fetch.version)))
        self._return_leases(fetch)

    def _return_leases(self, fetch: Fetch) -> None:
        for rank in fetch.done_with():
            self._send_mail(rank, LeaseReturn(self._transport.rank, fetch.version))
