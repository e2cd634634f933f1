"""The relay's loop: fetch each version from the one before it in the chain, hand it on, lend it to the rollouts of its node."""

from __future__ import annotations

from laminar_hpc.errors import ProtocolError
from laminar_hpc.mpi.transport import build_transport
from laminar_hpc.process.channel import Channel
from laminar_hpc.protocol.commands import Broadcast
from laminar_hpc.protocol.events import RelayHolds, RelayReady
from laminar_hpc.protocol.peer import ChunkRequest, LeaseRequest, LeaseReturn, Manifest
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.runtime.rank import Rank
from laminar_hpc.weights.forward import Forwarder
from laminar_hpc.weights.pull import Lender


class RelayLoop:
    """A link of the chain. It has no worker: it moves bytes."""

    def __init__(self, rank: Rank) -> None:
        self.done = False
        self.clean = True
        self._rank = rank
        self._forwarder: Forwarder | None = None
        self._lender: Lender | None = None
        self._early: list[tuple[int, AnyRecord]] = []

    def start(self, now: float) -> None:
        """Say hello."""
        self._rank.tell_manager(RelayReady(rank=self._rank.world.rank, incarnation=0, node=self._rank.me.node))

    def receive(self, source: int, message: AnyRecord, now: float) -> None:
        """Take one message."""
        if isinstance(message, Manifest):
            self._begin(message)
            for early_source, early in self._early:
                self.receive(early_source, early, now)
            self._early.clear()
            return
        if self._forwarder is None or self._lender is None:
            self._early.append((source, message))  # from another relay, which had its manifest sooner
            return
        match message:
            case Broadcast():
                self._forwarder.start(message, now)
            case ChunkRequest():
                self._forwarder.serve(message)
            case LeaseRequest():
                self._lender.asked(message)
            case LeaseReturn():
                self._lender.returned(message)
            case _:
                raise ProtocolError(f"{self._rank.name}: unexpected {type(message).__name__} from rank {source}")

    def turn(self, now: float) -> bool:
        """Move chunks; tell the manager what is complete."""
        if self._forwarder is None or self._lender is None:
            return False
        complete = self._forwarder.poll(now)
        for version, seconds, nbytes in complete:
            self._rank.tell_manager(
                RelayHolds(rank=self._rank.world.rank, incarnation=0, version=version, seconds=seconds)
            )
            if self._rank.record is not None:
                self._rank.record.add("relay_versions", version=version, time_s=now, seconds=seconds, nbytes=nbytes)
        self._lender.poll()
        return bool(complete) or self._forwarder.moved

    def waiting_for(self) -> str:
        """What this relay waits for."""
        return "the manifest" if self._forwarder is None else self._forwarder.waiting_for

    def phase(self, busy: bool) -> str:
        """Whether chunks are under way."""
        if self._forwarder is None:
            return "start"
        return "transfer" if self._forwarder.busy else "idle"

    def channels(self) -> list[Channel]:
        """None: a relay has no worker."""
        return []

    def close(self) -> None:
        """Give the image's memory back."""
        if self._forwarder is not None:
            self._forwarder.close()

    def _begin(self, manifest: Manifest) -> None:
        rank = self._rank
        weights = rank.config.weights
        self._forwarder = Forwarder(
            build_transport(weights.transport, rank.world),
            manifest,
            rank.mail.send,
            window=weights.window,
            slots=weights.slots,
            verify=weights.verify,
        )
        self._lender = Lender(self._forwarder.image, rank.mail.send)
