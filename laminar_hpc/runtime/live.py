"""What a person sees while the job runs: a line on stdout for each step, and the status file."""

from __future__ import annotations

import time
from collections import deque

import msgspec

from laminar_hpc.control.controller import Controller
from laminar_hpc.errors import RecordError
from laminar_hpc.protocol.commands import EndJob, ReportEvaluation, ReportStep
from laminar_hpc.protocol.events import AnyEvent, RankLost, Streamed
from laminar_hpc.protocol.peer import Pace
from laminar_hpc.record.status import Status, write_status
from laminar_hpc.runtime.rank import Rank, say
from laminar_hpc.runtime.starting import Starting, counted

RATE_WINDOW_S = 10.0
"""Generation speed and busy rollouts are means over this long."""

REFRESH_S = 1.0
"""How often the status file is written."""


class _Level(msgspec.Struct):
    """What the value was from `since_s` on, and the integral of all before."""

    since_s: float
    value: int
    integral: float


class RecentMean:
    """The mean of a whole number over the last `window_s`, or since it was first not 0 where that is less long ago."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._levels: deque[_Level] = deque()

    def note(self, value: int, now: float) -> None:
        """The number is `value` from `now` (seconds) on, which is never less than at the call before."""
        if not self._levels:
            if value:
                self._levels.append(_Level(now, value, 0.0))
            return
        last = self._levels[-1]
        if value != last.value:
            self._levels.append(_Level(now, value, last.integral + last.value * (now - last.since_s)))
            self._forget(now)

    def at(self, now: float) -> float:
        """The mean at `now`."""
        if not self._levels:
            return 0.0
        self._forget(now)
        first, last = self._levels[0], self._levels[-1]
        begun_s = max(first.since_s, now - self._window_s)
        before = first.integral + first.value * (begun_s - first.since_s)
        whole = last.integral + last.value * (now - last.since_s)
        return (whole - before) / (now - begun_s) if now > begun_s else float(last.value)

    def _forget(self, now: float) -> None:
        while len(self._levels) > 1 and self._levels[1].since_s <= now - self._window_s:
            self._levels.popleft()


def loss_line(event: RankLost) -> str:
    """What is lost, in one line: a rank, which the reason names, or a rank's worker alone."""
    return event.reason if event.role else f"rank {event.rank} lost its worker: {event.reason}"


class Live:
    """Keeps the figures that a person wants to see."""

    def __init__(self, rank: Rank, controller: Controller) -> None:
        self._rank = rank
        self._controller = controller
        self._generated: deque[tuple[float, int]] = deque()
        self._streamed: dict[int, int] = {}
        self._next_refresh = 0.0
        self._last_step_s = 0.0
        self._evaluated = 0
        self._first_tokens_s: float | None = None
        self._busy = RecentMean(RATE_WINDOW_S)
        self._paces: dict[int, Pace] = {}
        self._status = Status.blank()
        job = rank.config.job
        self._starting = Starting(job.trainers, job.relays, job.rollouts)
        self._status.reason = self._starting.phrase()
        self._status.attempt = rank.attempt
        self._status.steps = rank.config.control.steps
        self._status.rollouts = rank.config.job.rollouts

    def start(self, now: float) -> None:
        """Say what begins."""
        config = self._rank.config
        job = config.job
        say(
            f"{job.ranks} ranks: 1 manager, {counted(job.trainers, 'trainer')}, {counted(job.relays, 'relay')}, "
            f"{counted(job.rollouts, 'rollout')}; "
            f"mode {config.control.mode}, engines {config.trainer.engine} and {config.rollout.engine}; "
            f"{self._rank.world.library.split(',')[0]}",
        )
        self.refresh(now)

    def hear(self, event: AnyEvent, now: float) -> None:
        """Count what was generated, what was lost, and who is busy now."""
        self._busy.note(self._controller.rollouts_busy, now)
        if (line := self._starting.hear(event)) is not None:
            say(line)
        match event:
            case Streamed():
                new = 0
                if self._first_tokens_s is None:
                    self._first_tokens_s = self._last_step_s = now  # rates do not count the start
                for progress in event.progress:
                    new += max(0, progress.tokens - self._streamed.get(progress.trajectory, 0))
                    self._streamed[progress.trajectory] = progress.tokens
                self._generated.append((now, new))
            case RankLost():
                say(loss_line(event))
            case _:
                pass

    def hear_pace(self, rank: int, pace: Pace) -> None:
        """How well a rank's emulated work has kept to its schedule since it last said so."""
        self._paces[rank] = self._paces.get(rank, Pace()) + pace
        paces = self._paces.values()
        scheduled_s = sum(one.scheduled_s for one in paces)
        self._status.lag = sum(one.late_s for one in paces) / max(scheduled_s, 1e-9)
        self._status.lag_of_worst_rank = max(one.late_s / max(one.scheduled_s, 1e-9) for one in paces)

    def report(self, report: ReportStep | ReportEvaluation, now: float) -> None:
        """Print a line; keep the figures."""
        status = self._status
        if isinstance(report, ReportEvaluation):
            if status.first_accuracy is None:
                status.first_accuracy = report.accuracy
            if report.version >= self._evaluated:  # an old version on a slow rollout may report late
                self._evaluated = report.version
                status.last_accuracy = report.accuracy
            say(
                f"held-out prompts, version {report.version} (step {report.step}): accuracy {report.accuracy:.3f}, "
                f"reward {report.reward_mean:.3f}, {report.graded} of {report.prompts} graded",
            )
            return
        tokens = report.prompt_tokens + report.response_tokens
        status.training_tokens_per_s = tokens / max(report.finished_s - self._last_step_s, 1e-9)
        self._last_step_s = report.finished_s
        status.step, status.version = report.step, report.version
        status.reward, status.staleness = report.reward_mean, report.staleness_consumption_mean
        self._measure(now)
        say(status.line())

    def refresh(self, now: float) -> None:
        """To be called often: brings the status file up to date now and then."""
        if now < self._next_refresh:
            return
        self._next_refresh = now + REFRESH_S
        self._measure(now)
        self._status.reason = "training" if self._controller.started else self._starting.phrase()
        self._write()

    def forget(self, trajectory: int) -> None:
        """A trajectory is settled."""
        self._streamed.pop(trajectory, None)

    def finish(self, ending: EndJob) -> None:
        """The last status: how it ended."""
        status = self._status
        status.state, status.reason = ending.outcome, ending.reason
        status.updated_s = status.ended_s = time.time()
        self._write()

    def _write(self) -> None:
        """A disk that is full now must not end a run for its display."""
        try:
            write_status(self._rank.config.run_dir, self._status)
        except RecordError as error:
            say(f"{self._rank.name}: {error}", error=True)

    def _measure(self, now: float) -> None:
        while self._generated and self._generated[0][0] < now - RATE_WINDOW_S:
            self._generated.popleft()
        tokens = sum(count for _, count in self._generated)
        span_s = min(RATE_WINDOW_S, now - self._first_tokens_s) if self._first_tokens_s is not None else 0.0
        self._status.generation_tokens_per_s = tokens / max(span_s, REFRESH_S)
        self._status.rollouts_busy = self._busy.at(now)
        self._status.updated_s = time.time()
