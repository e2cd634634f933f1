"""The relays in virtual time: each holds a version when the chain's formula says so."""

from __future__ import annotations

from collections.abc import Callable

from laminar_hpc.protocol.commands import Broadcast, Drop
from laminar_hpc.protocol.events import AnyEvent, RelayHolds, RelayReady
from laminar_hpc.sim.costs import SimulatedCosts
from laminar_hpc.sim.kernel import Kernel, Timer
from laminar_hpc.sim.recording import PhaseClock, Recorder


class SimulatedRelays:
    """All relays; none of them fails."""

    def __init__(
        self,
        nodes: dict[int, str],
        trainer_nodes: set[str],
        costs: SimulatedCosts,
        kernel: Kernel,
        tell: Callable[[AnyEvent], None],
        recorder: Recorder | None,
    ) -> None:
        """`nodes` has the node of each relay, by its rank; `tell` reaches the manager."""
        self._nodes = nodes
        self._trainer_nodes = trainer_nodes
        self._costs = costs
        self._kernel = kernel
        self._tell = tell
        self._recorder = recorder
        self._held = dict.fromkeys(nodes, -1)
        self._due: dict[tuple[int, int], Timer] = {}
        self._phases = {rank: PhaseClock(recorder, rank, "idle") for rank in nodes}

    def report(self) -> None:
        """All of them are up."""
        for rank, node in self._nodes.items():
            self._tell(RelayReady(rank, 0, node))

    def held(self, rank: int) -> int:
        """The newest version that relay `rank` holds; -1 for none."""
        return self._held[rank]

    def obey(self, command: Broadcast | Drop) -> None:
        """A version sets out, or is given up by those that have not got it."""
        match command:
            case Broadcast():
                remote = self._nodes[command.chain[0]] not in self._trainer_nodes
                for place, rank in enumerate(command.chain):
                    self._expect(rank, command.version, self._costs.reception_s(place, remote))
            case Drop():
                for key in [key for key in self._due if key[1] == command.version]:
                    self._due.pop(key).cancel()

    def close(self) -> None:
        """The job is over."""
        for phases in self._phases.values():
            phases.tell(self._kernel.now)

    def _expect(self, rank: int, version: int, seconds: float) -> None:
        key = (rank, version)
        if key not in self._due and version > self._held[rank]:
            due_s = self._kernel.now + seconds
            self._due[key] = self._kernel.at(due_s, lambda: self._holds(rank, version, seconds))

    def _holds(self, rank: int, version: int, seconds: float) -> None:
        del self._due[rank, version]
        self._held[rank] = max(self._held[rank], version)
        if self._recorder is not None:
            nbytes = self._costs.image_bytes
            row = {"version": version, "time_s": self._kernel.now, "what": "complete", "seconds": seconds}
            self._recorder.add(rank, "relay_versions", **row, nbytes=nbytes, memory_bytes=nbytes)
        self._tell(RelayHolds(rank, 0, version, seconds, b""))
