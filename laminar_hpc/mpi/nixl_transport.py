"""The transport `nixl`: remote direct memory access over UCX, apart from MPI, so that its peers can come and go.

The receiver reads. Its ticket tells the sender where to reach it; the sender, when the bytes are there, answers with an
*offer* (where they are); the receiver reads them straight into its buffer, and a *receipt*, which NIXL delivers when the
read is complete, ends the send. Were the sender to write instead, one that was taken for lost and wakes up would write
into memory that is in use for something else by then, and nothing could stop it. So nobody but its owner ever writes to a
buffer, and a receive that was cancelled before its offer came is over at once; an offer for it is answered with a receipt.

What ends when a rank is gone: a read fails by itself, or when the connection to that rank is closed, which `forget` and
the death of a rank under MPI do; a send to it has nothing that could fail, and ends by `forget` or by such a death. Until the
other rank forgets this one too, it may still read: what it gets then is told from what it should by its digest alone.

Agents (NIXL's name for a process) are made for one process and named after it. Every ticket and offer carries what its
receiver needs to reach the other agent, a few hundred bytes, so that there is no handshake and nothing to restore.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from laminar_hpc.errors import ConfigError, PeerLost, ProtocolError
from laminar_hpc.mpi.world import World

_TCP_SEGMENT = "256k"  # TCP has no remote reads; UCX sends answers in segments, and with its 8 KB takes twice as long
_BUILDS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What a sender needs to know: the receiver's agent, its name for the receive, and for how many bytes."""

    receive: int
    nbytes: int
    metadata: bytes


class Offer(msgspec.Struct, frozen=True, tag="offer", array_like=True):
    """A sender's bytes for a receive: where they are, and the sender's name for the send."""

    receive: int
    send: int
    address: int
    nbytes: int
    metadata: bytes


class Receipt(msgspec.Struct, frozen=True, tag="receipt", array_like=True):
    """The receiver has what was sent, or does not want it: the sender's memory is its own again."""

    send: int


_note: msgspec.msgpack.Decoder[Offer | Receipt] = msgspec.msgpack.Decoder(Offer | Receipt)


class NixlTransport:
    """RDMA by NIXL; UCX chooses the network (UCX_TLS and UCX_NET_DEVICES say so to it)."""

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self._world = world
        for variable in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
            os.environ.setdefault(variable, _TCP_SEGMENT)
        api, self.errors = load_nixl()
        # A progress thread would take about a core; here whoever waits makes progress, in `poll`.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = api.nixl_agent(f"rank {self.rank} {os.urandom(8).hex()}", config)
        if "UCX" not in self._agent.backends:
            raise ConfigError(
                f"weights.transport: this NIXL has no UCX, only {', '.join(self._agent.get_plugin_list())}"
            )
        self._metadata = self._agent.get_agent_metadata()
        self._regions: list[tuple[int, int, NDArray[np.uint8], Any]] = []  # first address, the one after the last one
        self._numbers = itertools.count()
        self._receives: dict[int, _Receive] = {}
        self._sends: dict[int, _Send] = {}
        self._known: dict[str, bytes] = {}  # by agent: what was last loaded of its metadata
        self._agents: dict[int, set[str]] = {}  # by rank
        self._buried: frozenset[int] = frozenset()

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Pin `memory`."""
        if memory.nbytes:
            address = memory.ctypes.data
            handle = self._agent.register_memory([(address, memory.nbytes, 0, "")], "DRAM")
            self._regions.append((address, address + memory.nbytes, memory, handle))
            self._metadata = self._agent.get_agent_metadata()

    def receive(self, source: int, buffer: NDArray[np.uint8]) -> _Receive:
        """Wait for an offer."""
        self._check(buffer)
        number = next(self._numbers)
        ticket = msgspec.msgpack.encode(Ticket(number, buffer.nbytes, self._metadata))
        receive = _Receive(self, source, buffer, number, ticket)
        self._receives[number] = receive
        return receive

    def send(self, dest: int, ticket: bytes, buffer: NDArray[np.uint8]) -> _Send:
        """Make an offer."""
        self._check(buffer)
        try:
            wanted = msgspec.msgpack.decode(ticket, type=Ticket)
        except msgspec.DecodeError as error:
            raise ProtocolError(
                f"rank {self.rank}: rank {dest} gave a ticket that is none of NIXL's: {error}"
            ) from error
        send = _Send(self, dest, buffer, next(self._numbers))
        if wanted.nbytes != buffer.nbytes:
            raise send.failure(f"it waits for {wanted.nbytes} bytes, not {buffer.nbytes}")
        offer = Offer(wanted.receive, send.number, buffer.ctypes.data, buffer.nbytes, self._metadata)
        self._sends[send.number] = send
        if not self._notify(dest, wanted.metadata, offer):
            send.lose()
        return send

    def forget(self, rank: int) -> None:
        """End all transfers with `rank`."""
        for send in [send for send in self._sends.values() if send.peer == rank]:
            send.lose()
        receives = [receive for receive in self._receives.values() if receive.peer == rank]
        if any(receive.reading for receive in receives):
            self._disconnect(rank)
        for receive in receives:
            receive.give_up()

    def poll(self) -> None:
        """Go on with all that is under way, and end the transfers with ranks that have died."""
        for notes in self._agent.get_new_notifs(backends=["UCX"]).values():
            for data in notes:
                self._take(data)
        for receive in [receive for receive in self._receives.values() if receive.reading]:
            receive.look()  # NIXL sends the receipt when it is asked about the read
        dead = self._world.dead()
        if dead != self._buried:
            buried, self._buried = self._buried, dead
            for rank in dead - buried:
                self._disconnect(rank)
        for rank in dead & {transfer.peer for transfer in [*self._sends.values(), *self._receives.values()]}:
            self.forget(rank)

    def close(self) -> None:
        """Unpin what was registered, and leave."""
        for rank in list(self._agents):
            self._disconnect(rank)
        for _, _, _, handle in self._regions:
            self._agent.deregister_memory(handle)
        self._regions.clear()

    def _check(self, buffer: NDArray[np.uint8]) -> None:
        first, end = buffer.ctypes.data, buffer.ctypes.data + buffer.nbytes
        if buffer.nbytes and not any(low <= first and end <= high for low, high, _, _ in self._regions):
            raise ProtocolError(
                f"rank {self.rank}: {buffer.nbytes} bytes at {first:#x} lie in no registered memory; NIXL moves no others"
            )

    def _take(self, data: bytes) -> None:
        try:
            note = _note.decode(data)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"rank {self.rank}: a note of another agent is none: {error}") from error
        if isinstance(note, Receipt):
            if note.send in self._sends:
                self._sends[note.send].end(None)
            return
        receive = self._receives.get(note.receive)
        if receive is None or not receive.wants(note):
            self._notify(None if receive is None else receive.peer, note.metadata, Receipt(note.send))
        elif note.nbytes:
            receive.read(note)
        else:
            self._notify(receive.peer, note.metadata, Receipt(note.send))
            receive.end(None)

    def _notify(self, rank: int | None, metadata: bytes, note: Offer | Receipt) -> bool:
        """Tell an agent something; False where it cannot be reached."""
        data = msgspec.msgpack.encode(note)
        return self.with_agent(rank, metadata, lambda name: self._agent.send_notif(name, data))

    def with_agent(self, rank: int | None, metadata: bytes, action: Any) -> bool:
        """Do something towards an agent, over a new connection where the one there was is closed; False in vain."""
        for _ in range(2):
            try:
                name = self._know(rank, metadata)
            except self.errors:
                return False
            try:
                action(name)
            except self.errors:
                self._drop(name)
            else:
                return True
        return False

    def _know(self, rank: int | None, metadata: bytes) -> str:
        """The name of the agent that `metadata` is from, which can be reached from now on."""
        name = next((name for name, known in self._known.items() if known == metadata), None)
        if name is None:
            answer = self._agent.add_remote_agent(metadata)
            name = answer.decode() if isinstance(answer, bytes) else str(answer)
            self._known[name] = metadata
        if rank is not None:
            self._agents.setdefault(rank, set()).add(name)
        return name

    def _disconnect(self, rank: int) -> None:
        """Close the connections with `rank`: reads from it fail, and what is left of them touches nothing."""
        for name in self._agents.pop(rank, set()):
            self._drop(name)

    def _drop(self, name: str) -> None:
        if self._known.pop(name, None) is not None:
            try:
                self._agent.remove_remote_agent(name)
            except self.errors as error:
                logging.getLogger(__name__).debug("rank %d: %s was not connected: %s", self.rank, name, error)


class _NixlTransfer:
    doing = ""

    def __init__(self, transport: NixlTransport, peer: int, buffer: NDArray[np.uint8], number: int) -> None:
        self.peer = peer
        self.number = number
        self._transport = transport
        self._buffer = buffer
        self._ended = False
        self._error: PeerLost | ProtocolError | None = None

    def done(self) -> bool:
        """See Transfer."""
        if not self._ended:
            self._transport.poll()
        if self._error is not None:
            raise self._error
        return self._ended

    def end(self, error: PeerLost | ProtocolError | None) -> None:
        """The buffer is the caller's again."""
        self._ended = True
        self._error = error

    def lose(self) -> None:
        """It ends, since the other rank is gone."""
        self.end(PeerLost(self.peer, f"rank {self._transport.rank}: {self.doing} rank {self.peer}, which is gone"))

    def failure(self, reason: str) -> ProtocolError:
        """The error to raise for anything but a lost rank."""
        return ProtocolError(f"rank {self._transport.rank}: {self.doing} rank {self.peer} failed: {reason}")


class _Send(_NixlTransfer):
    doing = "sending weights to"

    def end(self, error: PeerLost | ProtocolError | None) -> None:
        super().end(error)
        self._transport._sends.pop(self.number, None)


class _Receive(_NixlTransfer):
    doing = "receiving weights from"

    def __init__(
        self, transport: NixlTransport, peer: int, buffer: NDArray[np.uint8], number: int, ticket: bytes
    ) -> None:
        super().__init__(transport, peer, buffer, number)
        self.ticket = ticket
        self._handle: Any = None
        self._given_up = False

    @property
    def reading(self) -> bool:
        """Whether NIXL may write to the buffer at this moment."""
        return self._handle is not None

    def wants(self, offer: Offer) -> bool:
        """Whether this offer is the first one, and of the right size."""
        return not self.reading and offer.nbytes == self._buffer.nbytes

    def read(self, offer: Offer) -> None:
        """Begin to read what is offered."""
        agent = self._transport._agent
        here = agent.get_xfer_descs([(self._buffer.ctypes.data, offer.nbytes, 0)], "DRAM")
        there = agent.get_xfer_descs([(offer.address, offer.nbytes, 0)], "DRAM")
        receipt = msgspec.msgpack.encode(Receipt(offer.send))

        def begin(name: str) -> None:
            self._handle = agent.initialize_xfer("READ", here, there, name, receipt, ["UCX"])
            try:
                agent.transfer(self._handle)
            except self._transport.errors:
                self._handle = None
                raise

        if not self._transport.with_agent(self.peer, offer.metadata, begin):
            self.lose()

    def cancel(self) -> bool:
        """See Receive."""
        try:
            if self.done():
                return True
        except PeerLost:
            return True
        if not self.reading:
            self.end(None)
        return self._ended

    def give_up(self) -> None:
        """The other rank counts as gone: it ends at once, or when NIXL has given up the read."""
        self._given_up = True
        self.look()

    def end(self, error: PeerLost | ProtocolError | None) -> None:
        super().end(error)
        self._transport._receives.pop(self.number, None)

    def look(self) -> None:
        """See how far the read is."""
        if self._ended:
            return
        if self._handle is None:
            if self._given_up:
                self.lose()
            return
        try:
            state = self._transport._agent.check_xfer_state(self._handle)
        except self._transport.errors:
            state = "ERR"
        if state == "PROC":
            return
        handle, self._handle = self._handle, None
        handle.release()
        if state == "DONE" and not self._given_up:
            self.end(None)
        else:
            self.lose()


NOT_INSTALLED = (
    "weights.transport: NIXL is not installed: pip install --no-deps nixl-cu12 (host memory needs neither CUDA nor PyTorch), "
    'or set weights.transport = "mpi"'
)


def check_nixl() -> None:
    """ConfigError where no build of NIXL is installed. Imports nothing of it."""
    if not any(importlib.util.find_spec(name) for name in _BUILDS):
        raise ConfigError(NOT_INSTALLED)


def load_nixl() -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL's Python interface, and the errors that it raises where another agent cannot be reached.

    The build is loaded by its own name: `nixl` looks for PyTorch's CUDA version, and loads a PyTorch that has none, which
    takes seconds and has no place in a process with MPI. For host memory all builds do.
    """
    for name in _BUILDS:
        try:
            api: ModuleType = importlib.import_module(f"{name}._api")
        except ImportError:
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to stdout
        bindings = api.nixlBind
        return api, (
            bindings.nixlBackendError,
            bindings.nixlCancelledError,
            bindings.nixlNotFoundError,
            bindings.nixlRemoteDisconnectError,
        )
    raise ConfigError(NOT_INSTALLED)
