"""The spare's loop: wait until the relay of this node is lost, then be the relay."""

from __future__ import annotations

from laminar_hpc.errors import ProtocolError
from laminar_hpc.process.channel import Channel
from laminar_hpc.protocol.commands import TakeOver
from laminar_hpc.protocol.events import SpareReady
from laminar_hpc.protocol.peer import Layout, Lost
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.runtime.rank import LONGEST_NAP_S, Rank
from laminar_hpc.runtime.relay import RelayLoop
from laminar_hpc.weights.epochs import Epochs


class SpareLoop:
    """Nothing until `TakeOver`, a `RelayLoop` from then on."""

    def __init__(self, rank: Rank) -> None:
        self.done = False
        self.clean = True
        self._rank = rank
        self._relay: RelayLoop | None = None
        self._epochs = Epochs()
        self._layout: Layout | None = None

    def start(self, now: float) -> None:
        """Say that there is a spare."""
        rank = self._rank
        rank.tell_manager(SpareReady(rank=rank.world.rank, incarnation=0, node=rank.me.node))

    def receive(self, source: int, message: AnyRecord, now: float) -> None:
        """Take one message."""
        if self._relay is not None:
            self._relay.receive(source, message, now)
        elif isinstance(message, TakeOver):
            self._rank.promote(self._rank.world.rank)
            self._relay = RelayLoop(self._rank, self._epochs, self._layout)
            self._relay.start(now)
        elif isinstance(message, Layout):
            self._layout = message
        elif isinstance(message, Lost):
            self._epochs.lost(message.rank, message.epoch)
        else:
            raise ProtocolError(f"{self._rank.name}: unexpected {type(message).__name__} from rank {source}")

    def turn(self, now: float) -> bool:
        """The relay's, if it is one."""
        return self._relay is not None and self._relay.turn(now)

    def waiting_for(self) -> str:
        """What this rank waits for: as a spare, nothing that anybody could be late with."""
        return "" if self._relay is None else self._relay.waiting_for()

    def phase(self, busy: bool) -> str:
        """As the relay; a spare is idle."""
        return "idle" if self._relay is None else self._relay.phase(busy)

    def longest_nap_s(self) -> float:
        """As the relay."""
        return LONGEST_NAP_S if self._relay is None else self._relay.longest_nap_s()

    def channels(self) -> list[Channel]:
        """None."""
        return []

    def close(self) -> None:
        """Give the relay's memory back."""
        if self._relay is not None:
            self._relay.close()
