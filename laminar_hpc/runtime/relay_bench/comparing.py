"""Rank 0's scripts for what is compared: broadcasts with the other ways, and a trainer's stall with a plain copy."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from laminar_hpc.policy.chain import broadcast_seconds
from laminar_hpc.runtime.rank import say
from laminar_hpc.runtime.relay_bench.director import Director
from laminar_hpc.runtime.relay_bench.ways import PATIENCE_S, PING_BYTES, PINGS, TRAINER, Order

WARM_UP = 3
"""Publications before the first that counts: then every slot of the trainer has been written once."""

STEEP_BYTES = 1 << 19
"""From here on the times of messages show what a byte costs. A limited link that was idle lets a burst pass for nothing: that
takes a constant off the times of all longer messages, and leaves their slope alone."""


class Line(NamedTuple):
    """A message of n bytes takes `startup_s + n * byte_s` seconds."""

    startup_s: float
    byte_s: float


class Broadcasts(Director):
    """Broadcasts, all ways in turn, after a ping-pong of its own."""

    def run(self) -> Iterator[None]:
        """For each number of relays, round after round, each way once."""
        plan = self.plan
        line = Line(0.0, 0.0)
        if max(plan.relays) > 1:
            yield from self._ping()
            line = fit([(int(answer.numbers[0]), answer.numbers[1]) for answer in self.answers[Order.PING]])
            say(
                f"bench: links, for the formula: {line.startup_s * 1e3:.3f} ms a transfer, "
                f"{1e-6 / max(line.byte_s, 1e-15):.1f} MB/s"
            )
        if "gloo" in plan.ways:
            for rank in (TRAINER, *self.relays):
                self.notes.send(rank, Order.GLOO)
            yield from self.answered(Order.GLOO, 1 + len(self.relays), PATIENCE_S)
        for relays in plan.relays:
            self.gather(relays)
            formula_s = broadcast_seconds(relays, plan.nbytes, self.chunks, line.startup_s, line.byte_s)
            for turn in range(-1, plan.repetitions):
                ways = [way for way in plan.ways if way != "copy" or relays > 1]
                for way in ways if turn % 2 else reversed(ways):
                    yield from self._time(way, relays, turn, formula_s)

    def _ping(self) -> Iterator[None]:
        for relay in self.relays[:2]:
            self.notes.send(relay, Order.PING)
        yield from self.answered(Order.PING, len(PING_BYTES) * PINGS)
        for answer in self.answers[Order.PING]:
            self.record.add("bench_pings", nbytes=int(answer.numbers[0]), seconds=answer.numbers[1])

    def _time(self, way: str, relays: int, turn: int, formula_s: float) -> Iterator[None]:
        """One round of one way. Turn -1 opens connections and is not noted."""
        publish_s = None
        if way == "relays":
            yield from self.publish()
            yield from self.complete()
            version = self.versions[self.version]
            assert version.published_s is not None, "it is complete"
            publish_s, seconds = version.published_s - version.asked_s, self.broadcast_s
        else:
            seconds = self.ways.measure(way, relays, turn + 1, self.chunks)
            yield
        if turn < 0:
            return
        say(f"bench: {relays} relays, {way}: {seconds:.3f} s")
        self.record.add(
            "bench_broadcasts",
            way=way,
            transport=self.plan.transport,
            relays=relays,
            nbytes=self.plan.nbytes,
            chunks=self.chunks if way in ("relays", "chain") else 1,
            repetition=turn,
            seconds=seconds,
            publish_s=publish_s,
            formula_s=formula_s if way == "relays" else None,
        )


class Publications(Director):
    """The trainer's stall beside a plain copy, in pairs, with the chain idle."""

    def run(self) -> Iterator[None]:
        """For each number of relays, pair after pair."""
        for relays in self.plan.relays:
            self.gather(relays)
            for turn in range(-WARM_UP, self.plan.repetitions):
                times: dict[str, float] = {}
                parts = (self._plain_copy, self._publication)
                for part in parts if turn % 2 else reversed(parts):
                    yield from part(times)
                if turn >= 0:
                    self.record.add(
                        "bench_publishes",
                        transport=self.plan.transport,
                        relays=relays,
                        nbytes=self.plan.nbytes,
                        repetition=turn,
                        **times,
                    )
            say(f"bench: {relays} relays, {self.plan.repetitions} publications")

    def _plain_copy(self, times: dict[str, float]) -> Iterator[None]:
        self.notes.send(TRAINER, Order.COPY)
        yield from self.answered(Order.COPY)
        times["copy_s"] = self.answers[Order.COPY].pop().numbers[0]

    def _publication(self, times: dict[str, float]) -> Iterator[None]:
        yield from self.publish()
        times["publish_s"] = self.versions[self.version].stall_s
        yield from self.complete()


def fit(pings: list[tuple[int, float]]) -> Line:
    """The line through the medians of these times: its slope by least squares, over the long messages.

    The startup is the time of the shortest one, since a burst that passes for nothing makes the line begin too low.
    """
    sizes = sorted({nbytes for nbytes, _ in pings})
    medians = {size: statistics.median(seconds for nbytes, seconds in pings if nbytes == size) for size in sizes}
    steep = [size for size in sizes if size >= STEEP_BYTES] or sizes
    slope, _ = statistics.linear_regression(steep, [medians[size] for size in steep])
    return Line(medians[sizes[0]], max(0.0, slope))
