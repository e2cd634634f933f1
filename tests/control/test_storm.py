"""Storms of random events: whatever happens, the invariants hold, and a job that is left alone afterwards finishes.

Only the loss of the last relay ends a job; test_tier_storm.py has worse weather for relays alone.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest
from fake_cluster import FakeCluster
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import InvariantChecker

from laminar_hpc.control.controller import Controller, Settings
from laminar_hpc.control.settings import RepackSettings
from laminar_hpc.control.snapshot import Snapshot
from laminar_hpc.policy.modes import MODES
from laminar_hpc.policy.sampling import EVICTIONS, SAMPLERS
from laminar_hpc.protocol.commands import HandOver, Interrupt, Pull, ReportMove, RestartTrainers, Settle
from laminar_hpc.protocol.events import (
    Event,
    JobFailed,
    Loaded,
    PullRefused,
    RankEvent,
    RankLost,
    Resumed,
    StopRequested,
)
from laminar_hpc.protocol.wire import encode

STORM_MOVES = 150


@st.composite
def small_jobs(draw: st.DrawFn, mode: str) -> Settings:
    minibatches = draw(st.integers(1, 2))
    prompts = minibatches * draw(st.integers(1, 3))
    trainers, eviction = draw(st.integers(1, 4)), draw(st.sampled_from(EVICTIONS))
    return Settings(
        mode=mode,
        steps=draw(st.integers(1, 8)),
        prompts=prompts,
        group_size=draw(st.integers(2, 4)),
        minibatches=minibatches,
        ahead=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        sampler=draw(st.sampled_from(SAMPLERS)) if MODES[mode].cohorts_ahead is None else "fifo",
        sampler_half_life=draw(st.sampled_from([0.5, 2.0])),
        capacity=0 if MODES[mode].waits or eviction == "wait" else draw(st.sampled_from([0, prompts, prompts + 1])),
        eviction=eviction,
        max_staleness=draw(st.integers(1, 4)),
        colocated=MODES[mode].alternates and draw(st.booleans()),
        evaluation_every=draw(st.integers(0, 3)),
        evaluation_prompts=draw(st.integers(1, 9)),
        held_out_prompts=draw(st.integers(5, 9)),
        train_prompts=draw(st.integers(1, 7)),
        seed=draw(st.integers(0, 3)),
        trainers=trainers,
        relays=draw(st.integers(1, 3)),
        rollouts=draw(st.integers(2, 4)),
        attempt=draw(st.sampled_from([0, 2])),
        checkpoint_every=draw(st.sampled_from([None, 0, 1, 2])),
        replicas=draw(st.sampled_from([None, *(count for count in (1, 2, 3) if trainers % count == 0)])),
        dynamic_sampling=draw(st.booleans()),
        max_response_tokens=draw(st.sampled_from([10, 1000])),
        repack=RepackSettings(
            enabled=draw(st.sampled_from([True, True, False])),
            every_s=draw(st.sampled_from([0.5, 4.0])),
            kv_share=draw(st.sampled_from([0.5, 0.99])),
            batch=draw(st.sampled_from([0, 3, 12])),
            gain_gate=draw(st.booleans()),
        ),
    )


class Storm:
    """A fake cluster whose ranks move at random, with losses, repeats, late messages and messages from the past."""

    def __init__(self, job: Settings, random: Random, calm: float, streaming: float = 0.3) -> None:
        self.random = random
        self.cluster = FakeCluster(
            job,
            random,
            concurrency=random.randint(job.group_size - 1, 3 * job.group_size),
            failing=0.2,
            spares=random.randint(0, 2),
        )
        self.cluster.full_disk = 0.2
        self.checker = InvariantChecker(job)
        self._calm = calm
        self._streaming = streaming

    def next_attempt(self) -> None:
        """Everything is killed, and started again from the newest checkpoint, or from nothing where there is none."""
        before = self.cluster
        job = msgspec.structs.replace(before.settings, attempt=before.settings.attempt + 1)
        self.cluster = FakeCluster(job, self.random, concurrency=before.rollouts[0].concurrency, failing=0.2)
        self.cluster.full_disk = before.full_disk
        self.cluster.committed = before.committed
        if before.committed is None:
            self.checker.start_again(job)
            return
        self.checker.resume(job, msgspec.msgpack.decode(before.committed, type=Snapshot))
        self._send(Resumed(before.committed, shift_s=-before.now))

    def rage(self, count: int) -> None:
        for _ in range(count):
            event = self._something()
            if event is not None:
                self._send(event)

    def _send(self, event: Event) -> None:
        self.checker.see(event, self.cluster.send(event))
        if isinstance(event, RankLost) and self.checker.tier.is_lost(event.rank):
            self.cluster.relays.taken_for_lost(event.rank)

    def _something(self) -> Event | None:
        random, cluster = self.random, self.cluster
        rollouts = [rollout for rollout in cluster.rollouts if rollout.ready]
        busy = [rollout for rollout in rollouts if rollout.tasks]
        if busy and random.random() < self._streaming:
            return cluster.stream(random.choice(busy))
        if random.random() >= self._calm:
            kind = random.choice(
                [
                    "repeat",
                    "ghost",
                    "stream",
                    "tool",
                    "crash",
                    "restart",
                    "silent",
                    "vanish",
                    "relay",
                    "relay",
                    "worker",
                ]
            )
            repeatable = [event for _, event in cluster.events if isinstance(event, RankEvent)]
            if kind == "repeat" and repeatable:
                return random.choice(repeatable)
            ghosts = cluster.ghosts + cluster.relays.ghosts
            if kind == "ghost" and ghosts:
                return random.choice(ghosts)
            if kind == "worker":
                return cluster.lose_worker()
            if kind == "relay":
                return cluster.relays.fault()
            if kind == "stream" and busy:
                return cluster.stream(random.choice(busy))
            if kind == "tool" and busy:
                rollout = random.choice(busy)
                return cluster.use_tool(rollout, random.choice(list(rollout.tasks.values())))
            down = [one for one in cluster.rollouts if not one.ready and not one.gone and one.incarnation > 0]
            if kind == "silent" and down:
                return cluster.take_for_lost(random.choice(down))
            if kind == "crash" and rollouts:
                return cluster.crash(random.choice(rollouts))
            if kind == "vanish" and (unheard := cluster.unheard()):
                return cluster.vanish(random.choice(unheard))
            if kind == "restart" and rollouts:
                rollout = random.choice(rollouts)
                cluster.crash(rollout)
                return cluster.come(rollout)
        moves = cluster.moves()
        return random.choice(moves)() if moves else None

    def settle_down(self) -> None:
        """From now on all goes well: the job must finish, and no rank may be left waiting before."""
        self.cluster.failing = self.cluster.full_disk = 0.0
        while self.cluster.controller.outcome is None:
            moves = self.cluster.moves()
            assert moves, self.cluster.controller.waits()
            event = self.random.choice(moves)()
            if event is not None:
                self._send(event)

    @property
    def out_of_relays(self) -> bool:
        """Whether the job has ended since its last relay was lost."""
        ended = self.checker.ended
        return ended is not None and ended.outcome == "failed" and "no other relay or spare is left" in ended.reason


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_invariants_hold_in_a_storm_and_the_job_finishes_after_it(mode, data):
    job = data.draw(small_jobs(mode))
    random = Random(data.draw(st.integers(0, 2**32), label="seed"))
    storm = Storm(job, random, calm=data.draw(st.sampled_from([0.6, 0.9, 0.97])))
    storm.rage(STORM_MOVES)
    storm.settle_down()
    assert storm.cluster.controller.outcome == "finished" or storm.out_of_relays
    assert storm.checker.ended is not None
    storm.checker.tier.check_record()


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_end_in_a_storm_returns_all_that_is_open(mode, data):
    job = data.draw(small_jobs(mode))
    storm = Storm(job, Random(data.draw(st.integers(0, 2**32), label="seed")), calm=0.9)
    storm.rage(data.draw(st.integers(0, STORM_MOVES)))
    outcome = data.draw(st.sampled_from(["stopped", "failed", "stalled"]))
    event = StopRequested("Ctrl-C") if outcome == "stopped" else JobFailed(outcome, "nothing moves")
    already = storm.cluster.controller.outcome
    storm.checker.see(event, storm.cluster.send(event))
    assert storm.cluster.controller.outcome == (already or outcome)
    storm.rage(20)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_fresh_controller_gives_the_same_commands_for_the_same_events(mode, data):
    job = data.draw(small_jobs(mode))
    storm = Storm(job, Random(data.draw(st.integers(0, 2**32), label="seed")), calm=0.9)
    storm.rage(STORM_MOVES)
    storm.settle_down()
    fresh = Controller(msgspec.json.decode(msgspec.json.encode(job), type=Settings))
    for (now, event), commands in zip(storm.cluster.events, storm.cluster.commands, strict=True):
        again = fresh.handle(event, now)
        assert again == commands
        assert [encode(command) for command in again] == [encode(command) for command in commands]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_attempts_that_are_killed_in_storms_or_asked_to_stop_are_one_run(mode, data):
    job = msgspec.structs.replace(data.draw(small_jobs(mode)), checkpoint_every=data.draw(st.integers(0, 2)))
    random = Random(data.draw(st.integers(0, 2**32), label="seed"))
    storm = Storm(job, random, calm=data.draw(st.sampled_from([0.6, 0.9, 0.97])))
    for moves in data.draw(st.lists(st.integers(0, STORM_MOVES), min_size=1, max_size=4)):
        storm.rage(moves)
        if storm.cluster.controller.outcome is None and random.random() < 0.5:
            storm._send(StopRequested("time limit", save=True))
            storm.rage(random.randint(0, 20))
            if random.random() < 0.5:
                storm.settle_down()
        if storm.cluster.controller.outcome in ("finished", "failed"):
            break
        storm.next_attempt()
    storm.settle_down()
    assert storm.cluster.controller.outcome in ("finished", "requeue") or storm.out_of_relays


def test_storms_have_moves_in_them_and_each_is_reported_once():
    endings: Counter[str] = Counter()
    for seed in range(40):
        random = Random(seed)
        job = Settings(
            mode="laminar",
            steps=12,
            prompts=4,
            group_size=2,
            train_prompts=5,
            trainers=1,
            relays=1,
            rollouts=6,
            ahead=4.0,
            repack=RepackSettings(every_s=0.5, batch=8, gain_gate=seed % 2 == 0),
            max_response_tokens=1000,
        )
        storm = Storm(job, random, calm=0.95, streaming=0.6)
        storm.rage(4 * STORM_MOVES)
        storm.settle_down()
        commands = [command for batch in storm.cluster.commands for command in batch]
        asked = [command.move for command in commands if isinstance(command, HandOver)]
        reports = [command for command in commands if isinstance(command, ReportMove)]
        assert sorted(report.move for report in reports) == asked
        for report in reports:
            endings[" ".join(report.ending.split()[:2])] += 1
            endings["expected"] += report.expected_gain_s is not None
            endings["actual"] += report.gain_s is not None
            endings["loaded"] += report.loaded_s is not None
    assert endings["moved"] > 100
    assert min(endings["expected"], endings["actual"], endings["loaded"]) > 10
    assert min(endings["the source"], endings["nothing was"]) > 0


def test_storms_have_interrupts_in_them():
    """And trajectories under several versions, some as stale as the bound allows, through other attempts too."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        job = Settings(
            mode="partial",
            steps=12,
            prompts=2,
            group_size=2,
            train_prompts=5,
            trainers=1,
            relays=2,
            rollouts=3,
            max_staleness=3,
            checkpoint_every=2,
            max_response_tokens=1000,
        )
        storm = Storm(job, Random(seed), calm=0.97, streaming=0.3)
        storm.rage(3 * STORM_MOVES)
        if seed % 2 and storm.cluster.controller.outcome is None:
            storm.next_attempt()
        storm.settle_down()
        commands = [command for batch in storm.cluster.commands for command in batch]
        seen["interrupts"] += sum(isinstance(command, Interrupt) for command in commands)
        outcomes = [one for command in commands if isinstance(command, Settle) for one in command.trajectories]
        for one in outcomes:
            seen["mixed"] += one.spans > 1
            seen["three versions"] += one.spans > 2
            seen["prefilled"] += one.prefilled_tokens > 0
            seen["at the bound"] += one.staleness_consumption == 3
            assert one.newest_version >= one.version
    assert min(seen.values()) >= 5, seen


def test_storms_have_versions_in_them_that_are_loaded_again():
    ends: Counter[str] = Counter()
    for seed in range(40):
        job = Settings(
            mode="laminar",
            steps=12,
            prompts=2,
            group_size=2,
            train_prompts=5,
            trainers=1,
            relays=2,
            rollouts=3,
            ahead=2.0,
            max_response_tokens=1000,
        )
        storm = Storm(job, Random(seed), calm=0.8, streaming=0.5)
        storm.rage(3 * STORM_MOVES)
        storm.settle_down()
        due: dict[int, Pull] = {}
        for (_, event), commands in zip(storm.cluster.events, storm.cluster.commands, strict=True):
            if isinstance(event, Loaded | PullRefused) and event.rank in due:
                pull = due[event.rank]
                if (event.incarnation, event.version) == (pull.incarnation, pull.version):
                    ends[type(event).__name__] += 1
                    del due[event.rank]
            due |= {one.rank: one for one in commands if isinstance(one, Pull) and one.exactly}
    assert min(ends["Loaded"], ends["PullRefused"]) > 5, ends


def test_storms_have_lost_workers_of_trainers_in_them():
    begun_with: Counter[str] = Counter()
    for seed in range(20):
        job = Settings(
            mode="laminar",
            steps=6,
            prompts=2,
            group_size=2,
            train_prompts=5,
            trainers=2,
            relays=1,
            rollouts=2,
            checkpoint_every=1,
        )
        storm = Storm(job, Random(seed), calm=0.8)
        storm.rage(4 * STORM_MOVES)
        storm.settle_down()
        for command in (command for batch in storm.cluster.commands for command in batch):
            if isinstance(command, RestartTrainers):
                begun_with["the model" if command.step is None else "a checkpoint"] += 1
    assert min(begun_with["the model"], begun_with["a checkpoint"]) > 2
