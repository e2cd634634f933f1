"""The bench's trainer and relays: the parts of a job that publish and pass on, and rank 0's orders beside them."""

from __future__ import annotations

import os
import signal
from collections import deque

from laminar_hpc.errors import EngineError, ProtocolError
from laminar_hpc.mpi.bare import Notes
from laminar_hpc.mpi.transport import build_transport
from laminar_hpc.process.channel import Channel, ChannelClosed
from laminar_hpc.process.worker import Worker
from laminar_hpc.protocol.commands import Publish, Release
from laminar_hpc.protocol.events import Published, TrainerReady
from laminar_hpc.protocol.peer import (
    BenchDone,
    BenchTask,
    ChunkRequest,
    Layout,
    LeaseReturn,
    Lost,
    Rendezvous,
    WeightsWritten,
    WorkerError,
)
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.record.schema import BENCH_WAYS
from laminar_hpc.runtime.memory import TRAINER_SLOTS
from laminar_hpc.runtime.rank import LONGEST_NAP_S, MANAGER, TRANSFER_NAP_S, Rank
from laminar_hpc.runtime.relay import RelayLoop
from laminar_hpc.runtime.relay_bench import worker
from laminar_hpc.runtime.relay_bench.plan import Plan
from laminar_hpc.runtime.relay_bench.ways import FIRST_RELAY, Order, Ways
from laminar_hpc.weights.publish import Publisher


class BenchRelay(RelayLoop):
    """A relay as in a job, which carries out rank 0's orders between its turns."""

    def __init__(self, rank: Rank, notes: Notes, ways: Ways) -> None:
        super().__init__(rank)
        self._notes = notes
        self._ways = ways
        self._watched: tuple[int, int] | None = None  # `arrived` when rank 0 began to watch

    def receive(self, source: int, message: AnyRecord, now: float) -> None:
        """As a relay; and where the gloo workers meet."""
        if isinstance(message, Rendezvous):
            self._ways.join_gloo(message)
            self._notes.send(MANAGER, Order.GLOO)
            return
        super().receive(source, message, now)

    def turn(self, now: float) -> bool:
        """As a relay; then orders."""
        moved = super().turn(now)
        if self._watched is not None and self.arrived != self._watched:
            self._watched = None
            self._notes.send(MANAGER, Order.WATCH)
        order = self._notes.poll(MANAGER)
        if order is None:
            return moved
        self._carry_out(order)
        return True

    def close(self) -> None:
        """As a relay; the worker goes too."""
        self._ways.close()
        super().close()

    def _carry_out(self, order: list[float]) -> None:
        match Order(int(order[0])):
            case Order.WATCH:
                self._watched = self.arrived
            case Order.DIE:
                os.kill(os.getpid(), signal.SIGKILL)
            case Order.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Order.PING:
                for nbytes, seconds in self._ways.ping():
                    self._notes.send(MANAGER, Order.PING, nbytes, seconds)
            case _:
                common_order(self._ways, order)


class BenchTrainer:
    """A trainer whose worker only publishes."""

    def __init__(self, rank: Rank, notes: Notes, ways: Ways, plan: Plan) -> None:
        self.done = False
        self.clean = True
        self._rank = rank
        self._notes = notes
        self._ways = ways
        self._plan = plan
        self._transport = build_transport(rank.config.weights.transport, rank.world)
        self._publisher: Publisher | None = None
        self._worker: Worker | None = None
        self._to_publish: deque[int] = deque()
        self._stall_s: dict[int, float] = {}
        self._up = False

    def start(self, now: float) -> None:
        """Start the worker."""
        self._worker = Worker("publish", worker.publish, self._rank.log_path("worker"))
        self._worker.send(BenchTask(0, self._plan.nbytes))

    def receive(self, source: int, message: AnyRecord, now: float) -> None:
        """Take one message from another rank."""
        if isinstance(message, Layout):
            self._publisher = Publisher(
                self._transport, message, self._rank.mail.send, slots=TRAINER_SLOTS, verify=self._plan.verify
            )
            return
        publisher = self._publisher
        if publisher is None:
            raise ProtocolError(f"{self._rank.name}: {type(message).__name__} before the layout")
        match message:
            case Publish():
                self._to_publish.append(message.version)
            case ChunkRequest():
                publisher.serve(message)
            case LeaseReturn():
                publisher.returned(message)
            case Release():
                publisher.release(message.version)
            case Lost():
                publisher.forget(message.rank, message.epoch)
            case _:
                raise ProtocolError(f"{self._rank.name}: unexpected {type(message).__name__} from rank {source}")

    def turn(self, now: float) -> bool:
        """Hear the worker, give it the next version to write, move chunks, and carry out an order."""
        moved = self._hear_worker()
        publisher = self._publisher
        if publisher is not None:
            if self._to_publish and (request := publisher.begin(self._to_publish[0], now)) is not None:
                self._to_publish.popleft()
                self._require_worker().send(request)
                moved = True
            for version, digests in publisher.poll():
                rank = self._rank
                rank.tell_manager(Published(rank.world.rank, 0, version, digests, self._stall_s.pop(version)))
            moved |= publisher.moved
        order = self._notes.poll(MANAGER)
        if order is not None:
            self._carry_out(order)
        return moved or order is not None

    def waiting_for(self) -> str:
        """Nothing that anybody would look at."""
        return ""

    def phase(self, busy: bool) -> str:
        """The bench keeps no phases."""
        return "publish" if busy else "wait"

    def longest_nap_s(self) -> float:
        """Short while chunks are under way."""
        return TRANSFER_NAP_S if self._publisher is not None and self._publisher.busy else LONGEST_NAP_S

    def channels(self) -> list[Channel]:
        """The worker's."""
        return [self._worker.channel] if self._worker is not None else []

    def close(self) -> None:
        """End the workers and give the memory back."""
        if self._worker is not None:
            self._worker.kill()
        self._ways.close()
        if self._publisher is not None:
            self._publisher.close()
        self._transport.close()

    def _require_worker(self) -> Worker:
        assert self._worker is not None, "start was called"
        return self._worker

    def _hear_worker(self) -> bool:
        try:
            messages = self._require_worker().receive_all()
        except ChannelClosed as error:
            raise EngineError(f"the bench's worker has ended; see {self._rank.log_path('worker')}") from error
        for message in messages:
            match message:
                case BenchDone() if not self._up:
                    self._up = True
                    self._rank.tell_manager(TrainerReady(self._rank.world.rank, 0, 0))
                case BenchDone():
                    self._notes.send(MANAGER, Order.COPY, message.seconds)
                case WeightsWritten():
                    self._stall_s[message.version] = message.seconds
                    assert self._publisher is not None
                    self._publisher.written(message)
                case WorkerError():
                    raise EngineError(f"the bench's worker failed: {message.text}")
                case _:
                    raise ProtocolError(f"{self._rank.name}: unexpected {type(message).__name__} from its worker")
        return bool(messages)

    def _carry_out(self, order: list[float]) -> None:
        match Order(int(order[0])):
            case Order.COPY:
                self._require_worker().send(BenchTask(0, self._plan.nbytes))
            case Order.GLOO:
                common_order(self._ways, order)
                where = self._ways.gloo_address()
                for relay in range(FIRST_RELAY, self._rank.world.size):
                    self._rank.mail.send(relay, where)
                self._rank.mail.flush(5.0)
                self._ways.join_gloo(None)
                self._notes.send(MANAGER, Order.GLOO)
            case _:
                common_order(self._ways, order)


def common_order(ways: Ways, order: list[float]) -> None:
    """The orders that trainer and relays have in common."""
    kind = Order(int(order[0]))
    if kind is Order.WAY:
        _, way, relays, turn, chunks = (int(number) for number in order[:5])
        ways.take_part(BENCH_WAYS[way], relays, turn, chunks)
    elif kind is Order.GLOO:
        ways.start_gloo()
    else:
        raise ProtocolError(f"bench: unexpected order {kind.name}")
