"""How many events the controller handles in a second, in a laminar run with many rollouts.

Usage: python tests/control/bench_controller.py [--rollouts N] [--steps N] [--stream-s SECONDS] [--job-s SECONDS]

The ranks are played in virtual time: responses have lognormal lengths, every rollout streams all that it has begun at a
fixed interval, training and weights take fixed times. Only CPU time inside `handle` counts. `ahead` is such that all
rollouts have work.

How often rollouts stream decides what the mix is: at the config's default `rollout.stream_interval_s` a rollout sends 4
`Streamed` a second, each with all that it has in progress, against less than one `Finished`. `--job-s` ends the measurement
after so much virtual time.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections import Counter
from itertools import count
from random import Random

from laminar_hpc.control.controller import Controller, Settings
from laminar_hpc.protocol.commands import Broadcast, Command, Generate, Publish, Pull, Train
from laminar_hpc.protocol.events import (
    Event,
    Finished,
    Loaded,
    Progress,
    Published,
    RelayHolds,
    RelayReady,
    RolloutReady,
    Streamed,
    Trained,
    TrainerReady,
)
from laminar_hpc.protocol.trajectory import Stop, Verdict

CONCURRENCY, GROUP, PROMPTS, PER_RELAY, TRAINERS = 256, 16, 512, 8, 64
MEDIAN_S, SPREAD, TOKENS_PER_S = 60.0, 0.8, 30.0
TRAIN_S, RELAY_S, LOAD_S = 4.0, 1.0, 2.0


class Bench:
    def __init__(self, rollouts: int, steps: int, stream_s: float) -> None:
        self.stream_s = stream_s
        self.relays = rollouts // PER_RELAY
        self.settings = Settings(
            mode="laminar",
            steps=steps,
            prompts=PROMPTS,
            group_size=GROUP,
            minibatches=4,
            ahead=2.0 * rollouts * (CONCURRENCY // GROUP) / PROMPTS,
            train_prompts=100_000,
            trainers=TRAINERS,
            relays=self.relays,
            rollouts=rollouts,
            evaluation_every=10,
            evaluation_prompts=500,
            held_out_prompts=500,
        )
        self.controller = Controller(self.settings)
        self.random = Random(1)
        self.order = count()
        self.due: list[tuple[float, int, Event | int]] = []
        self.working: dict[int, dict[int, float]] = {}
        self.holds: dict[int, int] = {}
        self.trainers_free_s = 0.0
        self.now = 0.0
        self.events: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.progress = 0

    def at(self, time_s: float, event: Event | int) -> None:
        heapq.heappush(self.due, (time_s, next(self.order), event))

    def run(self, job_s: float) -> None:
        first_relay = 1 + TRAINERS
        first_rollout = first_relay + self.relays
        for index in range(TRAINERS):
            self.at(0.0, TrainerReady(1 + index, 0, index))
        for relay in range(first_relay, first_rollout):
            self.at(0.0, RelayReady(relay, 0, str(relay)))
        for place in range(self.settings.rollouts):
            rank, relay = first_rollout + place, first_relay + place // PER_RELAY
            self.working[rank] = {}
            self.at(0.0, RolloutReady(rank, 0, str(relay), relay, CONCURRENCY))
            self.at(self.stream_s * self.random.random(), rank)
        while self.controller.outcome is None and self.now < job_s:
            self.now, _, event = heapq.heappop(self.due)
            if isinstance(event, int):
                self.at(self.now + self.stream_s, event)
                event = self.stream(event, self.now)
            self.hear(event, self.now)

    def stream(self, rank: int, now: float) -> Event:
        begun = self.working[rank]
        progress = [Progress(id, int((now - begun_s) * TOKENS_PER_S)) for id, begun_s in begun.items()]
        self.progress += len(progress)
        return Streamed(rank, 0, progress, 0.9, len(progress), 0)

    def hear(self, event: Event, now: float) -> None:
        if isinstance(event, Finished):
            del self.working[event.rank][event.trajectory]
        elif isinstance(event, RelayHolds):
            self.holds[event.rank] = event.version
        kind = type(event).__name__
        self.events[kind] += 1
        start = time.process_time()
        commands = self.controller.handle(event, now)
        self.seconds[kind] += time.process_time() - start
        for command in commands:
            self.obey(command, now)

    def obey(self, command: Command, now: float) -> None:
        match command:
            case Generate():
                for spec in command.trajectories:
                    seconds = self.random.lognormvariate(0.0, SPREAD) * MEDIAN_S
                    self.working[command.rank][spec.id] = now
                    tokens = int(seconds * TOKENS_PER_S)
                    finished = Finished(
                        command.rank, 0, spec.id, command.version, 200, tokens, Stop.END_TOKEN, Verdict.GRADED, 1.0
                    )
                    self.at(now + seconds, finished)
            case Train():
                self.trainers_free_s = max(self.trainers_free_s, now) + TRAIN_S
                for index in range(TRAINERS):
                    trained = Trained(1 + index, 0, command.step, command.minibatch, 1, TRAIN_S, {"loss": 1.0})
                    self.at(self.trainers_free_s, trained)
            case Publish():
                for index in range(TRAINERS):
                    published = Published(1 + index, 0, command.version, b"8 bytes.", 0.1)
                    self.at(max(self.trainers_free_s, now), published)
            case Broadcast():
                for place, relay in enumerate(command.chain):
                    self.at(now + RELAY_S + 0.01 * place, RelayHolds(relay, 0, command.version, 1.0, b"8 bytes."))
            case Pull():
                self.at(now + LOAD_S, Loaded(command.rank, 0, command.version, b"", 0.0, LOAD_S))
            case _:
                pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stream-s", type=float, default=20.0)
    parser.add_argument("--job-s", type=float, default=float("inf"))
    options = parser.parse_args()
    bench = Bench(options.rollouts, options.steps, options.stream_s)
    bench.run(options.job_s)
    for kind, events in bench.events.most_common():
        seconds = bench.seconds[kind]
        print(f"{kind:12} {events:9,} events {seconds:8.2f} s {1e6 * seconds / events:8.1f} us each")
    print(f"{bench.progress:,} trajectories' progress in the streams")
    total, seconds = sum(bench.events.values()), sum(bench.seconds.values())
    print(f"{options.rollouts} rollouts, {total:,} events in {seconds:.2f} s: {total / seconds:,.0f} events/s")
    print(f"{bench.now:,.0f} s of the job took {seconds:.2f} s of CPU time: a load of {seconds / bench.now:.2f} cores")


if __name__ == "__main__":
    main()
