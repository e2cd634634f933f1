"""The relay's loop: fetch each version from the one before it in the chain, hand it on, lend it to the rollouts of its node."""

from __future__ import annotations

from laminar_hpc.errors import PeerLost, ProtocolError
from laminar_hpc.mpi.transport import Transport, build_transport
from laminar_hpc.policy.roles import Role
from laminar_hpc.process.channel import Channel
from laminar_hpc.protocol.commands import Broadcast, Drop
from laminar_hpc.protocol.events import LinkStalled, RelayHolds, RelayReady
from laminar_hpc.protocol.peer import (
    ChunkGone,
    ChunkRequest,
    ChunkSent,
    Layout,
    LeaseRequest,
    LeaseReturn,
    LinkMeasured,
    Lost,
    MeasureLink,
    ProbeRequest,
    Readmitted,
)
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.runtime.memory import check_memory, has_room
from laminar_hpc.runtime.rank import LONGEST_NAP_S, TRANSFER_NAP_S, Rank
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.forward import Forwarder
from laminar_hpc.weights.probe import LinkProbe, ProbeServer
from laminar_hpc.weights.pull import Lender


class RelayLoop:
    """A link of the chain. It has no worker: it moves bytes."""

    def __init__(self, rank: Rank, epochs: Epochs | None = None, layout: Layout | None = None) -> None:
        """For a spare that takes over: `epochs` has the losses that it has heard of by now, `layout` is there if it has come."""
        self._takes_over = epochs is not None
        self.done = False
        self.clean = True
        self._rank = rank
        self._incarnation = 0
        self._epochs = epochs or Epochs()
        self._transport: Transport = build_transport(rank.config.weights.transport, rank.world)
        self._layout = layout
        self._called_s = 0.0
        self._forwarder: Forwarder | None = None
        self._lender: Lender | None = None
        self._probe: LinkProbe | None = None
        self._probes = ProbeServer(self._transport)
        self._probing = False
        self._early: list[tuple[int, AnyRecord]] = []

    def start(self, now: float) -> None:
        """Say hello; a relay that takes over in mid-run, when it has its memory."""
        self._called_s = now
        if self._layout is None:
            self._say_ready()

    def receive(self, source: int, message: AnyRecord, now: float) -> None:
        """Take one message."""
        match message:
            case Layout():
                self._layout = message
                self._check_memory()
                self._begin(now)
            case MeasureLink():
                self._probe = LinkProbe(self._transport, self._rank.mail.send, message.source, now)
            case ProbeRequest():
                self._probes.serve(message)
            case Readmitted():
                self._begin_anew(message)
            case Lost():
                self._forget(message)
            case _ if self._forwarder is None:
                self._early.append((source, message))  # from another relay, which had its layout sooner
            case _:
                self._weights(source, message, now)

    def turn(self, now: float) -> bool:
        """Move chunks; tell the manager what is complete, and what does not come."""
        probing = self._measure(now)
        if self._takes_over and self._layout is not None and self._forwarder is None and self._has_memory(now):
            self._begin(now)
            self._say_ready()
        if self._forwarder is None or self._lender is None:
            return probing
        complete = self._forwarder.poll(now)
        for held in complete:
            self._tell_held(held.version, held.seconds, held.digest)
            self._note("complete", held.version, now, held.seconds, held.nbytes)
        for version in self._forwarder.skipped:
            self._note("given up", version, now, 0.0, 0)
        self._forwarder.skipped.clear()
        stalled = self._forwarder.stalled_on(now, self._rank.config.weights.relay_timeout_s)
        if stalled is not None:
            version, source = stalled
            self._rank.tell_manager(LinkStalled(self._rank.world.rank, self._incarnation, version, source))
        self._lender.poll()
        return bool(complete) or self._forwarder.moved or probing

    @property
    def arrived(self) -> tuple[int, int] | None:
        """The version under way and how many of its chunks are here; None where none is under way."""
        return None if self._forwarder is None else self._forwarder.arrived

    def waiting_for(self) -> str:
        """What this relay waits for."""
        if self._forwarder is not None:
            return self._forwarder.waiting_for
        return "the layout of the weights" if self._layout is None else "memory for the slots of the weight image"

    def phase(self, busy: bool) -> str:
        """Whether chunks are under way."""
        if self._forwarder is None:
            return "start"
        return "transfer" if self._forwarder.busy else "idle"

    def longest_nap_s(self) -> float:
        """Short while chunks are under way."""
        busy = self._probing or (self._forwarder is not None and self._forwarder.busy)
        return TRANSFER_NAP_S if busy else LONGEST_NAP_S

    def channels(self) -> list[Channel]:
        """None: a relay has no worker."""
        return []

    def close(self) -> None:
        """Give the image's memory back."""
        if self._forwarder is not None:
            self._forwarder.close()
        self._transport.close()

    # --- weights ----------------------------------------------------------------------------------------------------

    def _weights(self, source: int, message: AnyRecord, now: float) -> None:
        assert self._forwarder is not None
        assert self._lender is not None
        match message:
            case Broadcast():
                self._forwarder.start(message, now)
            case Drop():
                self._forwarder.drop(message.version)
            case ChunkRequest():
                self._forwarder.serve(message)
            case ChunkSent():
                self._forwarder.sent(message)
            case ChunkGone():
                self._forwarder.refused(message)
            case LeaseRequest():
                self._lender.asked(message)
            case LeaseReturn():
                self._lender.returned(message)
            case _:
                raise ProtocolError(f"{self._rank.name}: unexpected {type(message).__name__} from rank {source}")

    def _forget(self, lost: Lost) -> None:
        self._transport.forget(lost.rank)
        self._probes.forget(lost.rank)
        self._epochs.lost(lost.rank, lost.epoch)
        if self._forwarder is not None and self._lender is not None:
            self._forwarder.forget(lost.rank)
            self._lender.drop(lost.rank)

    def _has_memory(self, now: float) -> bool:
        """Whether there is memory to begin; ConfigError where there is none for too long.

        The lost relay's image is there until the rollouts of this node have weights from elsewhere.
        """
        assert self._layout is not None
        if has_room(self._layout.manifest.nbytes * self._rank.config.weights.slots):
            return True
        if now - self._called_s > self._rank.config.job.silence_timeout_s:
            self._check_memory()
        return False

    def _check_memory(self) -> None:
        assert self._layout is not None
        slots = self._rank.config.weights.slots
        check_memory(self._layout.manifest.nbytes * slots, f"{slots} slots of the weight image")

    def _begin(self, now: float) -> None:
        assert self._layout is not None
        rank, weights = self._rank, self._rank.config.weights
        self._forwarder = Forwarder(
            self._transport,
            self._layout,
            rank.mail.send,
            window=weights.window,
            slots=weights.slots,
            verify=weights.verify,
            epochs=self._epochs,
            has_room=has_room,
        )
        self._lender = Lender(self._forwarder.image, rank.mail.send, self._epochs)
        early, self._early = self._early, []
        for source, message in early:
            self._weights(source, message, now)

    def _begin_anew(self, message: Readmitted) -> None:
        """The others have gone on without this relay: what it has and what it asked for is void."""
        self._incarnation = message.incarnation
        for other in range(self._rank.world.size):
            if other != self._rank.world.rank:
                self._transport.forget(other)
                self._probes.forget(other)
        self._epochs.begin_anew(message.epoch)
        self._early.clear()
        if self._forwarder is not None and self._lender is not None:
            rank = self._rank
            on_node = {other for other in rank.ranks_of(Role.ROLLOUT) if rank.placements[other].node == rank.me.node}
            self._forwarder.begin_anew(on_node)
            self._lender.begin_anew()
        self._say_ready()

    def _say_ready(self) -> None:
        rank = self._rank
        rank.tell_manager(RelayReady(rank=rank.world.rank, incarnation=self._incarnation, node=rank.me.node))

    def _tell_held(self, version: int, seconds: float, digest: bytes) -> None:
        self._rank.tell_manager(
            RelayHolds(
                rank=self._rank.world.rank,
                incarnation=self._incarnation,
                version=version,
                seconds=seconds,
                digest=digest,
            )
        )

    def _note(self, what: str, version: int, now: float, seconds: float, nbytes: int) -> None:
        if self._rank.record is not None:
            self._rank.record.add(
                "relay_versions",
                version=version,
                time_s=now,
                what=what,
                seconds=seconds,
                nbytes=nbytes,
                memory_bytes=self._forwarder.image.memory_bytes if self._forwarder is not None else 0,
            )

    # --- links ------------------------------------------------------------------------------------------------------

    def _measure(self, now: float) -> bool:
        """Answer probes, and go on with the own one; whether there is one under way."""
        self._probing = self._probes.poll()
        if self._probe is None:
            return self._probing
        self._probing = True
        try:
            link = self._probe.poll(now)
        except PeerLost:
            self._probe = None
            return True
        if link is not None:
            self._rank.tell_manager(
                LinkMeasured(self._rank.world.rank, self._probe.source, link.startup_s, link.byte_s)
            )
            self._probe = None
        return True
