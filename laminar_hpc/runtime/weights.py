"""A rollout's weights, from the manager's word to the lease for its engine: whose relay, which lease, how long each part took.

idle > `request` > waiting for a lease > (from another node: fetching) > `poll` gives the lease > loading > `loaded` > idle
"""

from __future__ import annotations

from typing import NamedTuple

from laminar_hpc.mpi.transport import Transport, build_transport
from laminar_hpc.protocol.commands import Attach
from laminar_hpc.protocol.peer import ChunkGone, ChunkSent, Layout, Lease, LeaseRefused
from laminar_hpc.runtime.memory import has_room
from laminar_hpc.runtime.rank import Rank
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.pull import LentMemory, Puller
from laminar_hpc.weights.remote import RemoteImage


class PullTimes(NamedTuple):
    """Seconds from the manager's word to the lease, and from there until the engine was told to load."""

    wait_s: float
    copy_s: float


class WeightsDesk:
    """One rollout's pulls, from the relay of its node or, while that is lost, from another one."""

    def __init__(self, rank: Rank, relay: int) -> None:
        """`relay` is the one on its node."""
        self.moved = False
        """Whether the last `poll` moved anything."""
        self.loading = False
        """Whether the engine has been given a lease and has not said that it has loaded."""
        self._rank = rank
        self._puller = Puller(rank.world.rank, relay, rank.mail.send)
        self._memory = LentMemory()
        self._remote: RemoteImage | None = None
        self._from_afar = False
        self._transport: Transport | None = None
        self._layout: Layout | None = None
        self._lease: Lease | None = None
        self._version = -1  # what the engine was last told to load
        self._wanted = self._held = -1
        self._exactly = False
        self._again: int | None = None
        self._epochs = Epochs()
        self._asked_at: float | None = None
        self._lent_at = self._loading_at = 0.0

    @property
    def relay(self) -> int:
        """The rank that it pulls from."""
        return self._puller.relay

    @property
    def pulling(self) -> bool:
        """Whether a pull is under way, in whatever part of it."""
        return self._asked_at is not None

    @property
    def fetching(self) -> bool:
        """Whether chunks are under way to this rank."""
        return self._remote is not None and bool(self._remote.waiting_for)

    @property
    def waiting_for(self) -> str:
        """What it waits for and from whom; "" where it waits for no other rank."""
        return self._puller.waiting_for or (self._remote.waiting_for if self._remote is not None else "")

    def lay_out(self, layout: Layout) -> None:
        """What an image looks like."""
        self._layout = layout

    def request(self, version: int, exactly: bool, now: float) -> None:
        """The manager says: load the newest version, `version` at least, or `exactly` that one.

        It says so again when the relay is another one. An engine that is loading then goes on with what it has, and one that
        has loaded meanwhile has nothing to do.
        """
        if self.loading:
            self._again = version
            return
        if version <= self._held:
            return
        self._asked_at, self._wanted, self._exactly = now, version, exactly
        self._puller.request(version, exactly)

    def lent(self, source: int, lease: Lease, now: float) -> None:
        """A relay's answer."""
        wanted = self._puller.lent(source, lease)
        if wanted is None:
            return
        self._lent_at = now
        if self._from_afar:
            self._memory.close()  # the lost relay's, which its node needs for the next one
            self._fetch_from(source, wanted.version, now)
            return
        try:
            self._lease = self._memory.keep(wanted)
        except OSError:  # the relay died after it had answered: the manager will name another one, and ask again
            self._puller.drop()

    def declined(self, message: LeaseRefused) -> bool:
        """The relay has not got the version that was asked for exactly; False where it is not asked for any more."""
        if not self._puller.refused(message):
            return False
        self._asked_at = None
        return True

    def poll(self, now: float) -> Lease | None:
        """Move on; the lease to load from, when there is one."""
        self.moved = False
        if self._remote is not None:
            before = self._remote.waiting_for
            lease = self._remote.poll(now)
            self.moved = self._remote.waiting_for != before
            if lease is not None:
                self._puller.loaded()  # the relay's memory is needed no more
                self._lease = lease
            elif self._remote.gone:
                self._remote.drop()
                self._puller.drop()
                self._puller.request(self._wanted, self._exactly)
        lease, self._lease = self._lease, None
        if lease is not None:
            self._loading_at, self._version, self.loading = now, lease.version, True
        return lease

    def loaded(self) -> PullTimes | None:
        """The engine has loaded; None where that was not new enough, and the pull begins again."""
        assert self._asked_at is not None
        self._give_back()
        self._held = self._version
        again, self._again = self._again, None
        if again is not None and self._version < again:
            self._wanted = again
            self._puller.request(again)
            return None
        times = PullTimes(self._lent_at - self._asked_at, self._loading_at - self._lent_at)
        self._asked_at = None
        return times

    def drop(self) -> None:
        """The engine is gone, and with it the pull."""
        self._give_back()
        self._puller.drop()
        if self._remote is not None:
            self._remote.drop()
        self._lease = self._asked_at = self._again = None
        self._held = -1

    def attach(self, command: Attach) -> None:
        """Pull from another relay from now on. What the engine loads already it may load to the end."""
        if not self.loading:
            held = self._held
            self.drop()
            self._held = held
        self._puller.attach(command.relay)
        self._from_afar = command.remote

    def forget(self, rank: int, epoch: int) -> None:
        """`rank` is gone, by the loss of this epoch."""
        self._epochs.lost(rank, epoch)
        if self._remote is not None and self._transport is not None:
            self._transport.forget(rank)
            self._remote.forget(rank)

    def start_over(self, epoch: int) -> None:
        """The relays have taken this rank for gone, by the loss of this epoch; call it after `drop`."""
        self._epochs.begin_anew(epoch)
        self._puller.start_over(epoch)
        if self._remote is not None:
            self._remote.start_over()

    def close(self) -> None:
        """Give up what memory there is."""
        if self._remote is not None:
            self._remote.close()
        if self._transport is not None:
            self._transport.close()
        self._memory.close()

    def _give_back(self) -> None:
        if not self.loading:
            return
        self.loading = False
        if self._puller.lending:
            self._puller.loaded()
        if self._remote is not None:
            self._remote.done(self._version)

    def _fetch_from(self, relay: int, version: int, now: float) -> None:
        assert self._layout is not None
        rank, weights = self._rank, self._rank.config.weights
        if self._remote is None:
            self._transport = build_transport(weights.transport, rank.world)
            self._remote = RemoteImage(
                self._transport,
                self._layout,
                rank.mail.send,
                window=weights.window,
                verify=weights.verify,
                epochs=self._epochs,
                has_room=has_room,
            )
        self._remote.begin(relay, version, now)

    def sent(self, message: ChunkSent) -> None:
        """A relay says what it has sent."""
        if self._remote is not None:
            self._remote.sent(message)

    def refused(self, message: ChunkGone) -> None:
        """A relay will never have a chunk."""
        if self._remote is not None:
            self._remote.refused(message)
