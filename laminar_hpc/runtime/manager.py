"""The manager's loop: messages become events, the controller decides, commands become messages.

It holds no rule of its own. What it adds to the controller is what needs a clock or a file: the store's first shard, the
record, the live status, and three watchdogs: ranks that MPI finds dead, ranks that say nothing, and a job in which nothing
moves.
"""

from __future__ import annotations

import signal
import time
from typing import cast

import msgspec

from laminar_hpc.control.controller import Controller
from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.roles import Role
from laminar_hpc.process.channel import Channel
from laminar_hpc.protocol.commands import (
    Abandon,
    AnyCommand,
    Attach,
    Broadcast,
    Checkpoint,
    Commit,
    Drop,
    EndJob,
    Forget,
    Generate,
    HandOver,
    Interrupt,
    Publish,
    Pull,
    Readmit,
    Release,
    ReportEvaluation,
    ReportStep,
    RestartTrainers,
    Settle,
    Sever,
    TakeOver,
    Train,
)
from laminar_hpc.protocol.events import (
    AnyEvent,
    Event,
    JobFailed,
    LinkStalled,
    RankHeard,
    RankLost,
    RelayHolds,
    RelayReady,
    Resumed,
    StopRequested,
    Streamed,
)
from laminar_hpc.protocol.peer import (
    Append,
    Failure,
    Fetch,
    Goodbye,
    Heartbeat,
    LinkMeasured,
    Lost,
    ManagerAlive,
    Manifest,
    MeasureLink,
    Paced,
    Readmitted,
    Resume,
    Shard,
    Shutdown,
    StartOver,
)
from laminar_hpc.protocol.trajectory import State
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.record.manager import ManagerRecord
from laminar_hpc.runtime.checkpoint import (
    CheckpointKeeper,
    open_checkpoint,
    read_books,
    read_payload,
    relabelled,
)
from laminar_hpc.runtime.layout import LayoutDesk
from laminar_hpc.runtime.live import Live
from laminar_hpc.runtime.rank import FAREWELL_S, LONGEST_NAP_S, Rank, away_s, say
from laminar_hpc.runtime.store import Store

LINKS_S = 60.0
"""How long after the start the chunks' length waits for links that nobody has measured yet."""


class ManagerLoop:
    """Rank 0."""

    def __init__(self, rank: Rank) -> None:
        self.done = False
        self.clean = True
        self._rank = rank
        self._controller = Controller(rank.settings)
        self._store = Store()
        self._live = Live(rank, self._controller)
        self._recorded: ManagerRecord | None = None
        self._others = list(range(1, rank.world.size))
        self._trainers = rank.ranks_of(Role.TRAINER)
        self._moved = self._turned = 0.0
        self._beats: dict[int, tuple[float, Heartbeat]] = {}
        self._next_alive = 0.0
        self._ending: EndJob | None = None
        self._ending_since = 0.0
        self._left: set[int] = set()
        self._epoch = 0
        self._epoch_of: dict[int, int] = {}  # of each rank that was lost
        self._proven: set[int] = set()  # relays that have held a version
        self._silent: set[int] = set()  # relays and rollouts that were taken for lost, but are not known to be dead
        self._heard_again: set[int] = set()  # relays of these that have spoken since
        self._stop_by: float | None = None  # when a job that was asked to stop has to have ended
        self._zero_unix_s = time.time() - rank.now()
        keep = rank.config.checkpoint.keep
        self._keeper = CheckpointKeeper(
            rank.paths.checkpoints, rank.attempt, keep, self._zero_unix_s, len(self._trainers)
        )
        self._desk = LayoutDesk(len(self._trainers), rank.ranks_of(Role.RELAY), rank.config.weights.chunk_bytes)

    def start(self, now: float) -> None:
        """Open the books."""
        if self._rank.record is not None:
            self._recorded = ManagerRecord(self._rank.record, self._rank.config, self._rank.attempt)
        self._moved = self._turned = now
        self._live.start(now)
        if self._rank.resume is not None:
            self._resume(self._rank.resume, now)

    def receive(self, source: int, message: AnyRecord, now: float) -> None:
        """Take one message from another rank."""
        match message:
            case Append():
                self._store.append(message)
                if message.streamed is not None:
                    self._decide(message.streamed, now)
            case Fetch():
                self._fetch(message)
            case Heartbeat():
                self._hear(source, message, now)
            case Manifest() | Shard() | LinkMeasured():
                self._desk.add(message)
            case RelayReady():
                self._measure_links(message)
                self._decide(message, now)
            case RelayHolds():
                self._proven.add(source)
                self._decide(message, now)
            case Paced():
                self._live.hear_pace(source, message.pace)
            case Failure():
                self._beats.pop(source, None)
                self._left.add(source)
                self._decide(JobFailed("failed", f"rank {source} ({message.role}): {message.text}"), now)
            case Goodbye():
                self._left.add(source)
            case StopRequested():
                self._stop(message, now)
            case Event():
                self._decide(message, now)
            case _:
                raise ProtocolError(f"{self._rank.name}: unexpected {type(message).__name__} from rank {source}")

    def turn(self, now: float) -> bool:
        """Timers and watchdogs."""
        if self._ending is not None:
            return self._farewell(now)
        if away := away_s(self._turned, now, self._rank.heartbeat_s):
            self._beats = {rank: (heard + away, beat) for rank, (heard, beat) in self._beats.items()}
        self._turned = now
        if self._rank.terminated is not None:
            signal_name, self._rank.terminated = self._rank.terminated, None
            self._stop(StopRequested(f"signal {signal_name}", signal_name != signal.SIGINT.name), now)
        for event in self._keeper.poll():
            self._decide(event, now)
        if self._stop_by is not None and now > self._stop_by:
            grace_s = self._rank.config.checkpoint.grace_s
            self._decide(JobFailed("stopped", f"no checkpoint within {grace_s:g} s (checkpoint.grace_s)"), now)
        self._bury(now)
        self._watch_relays(now)
        self._lay_out(now)
        if now >= self._next_alive:
            self._next_alive = now + self._rank.config.job.heartbeat_s
            for rank in self._others:
                self._rank.mail.send(rank, ManagerAlive())
            self._watch(now)
        self._live.refresh(now)
        return False

    def waiting_for(self) -> str:
        """Nobody: the manager answers."""
        return ""

    def phase(self, busy: bool) -> str:
        """Work or idle."""
        return "work" if busy else "idle"

    def longest_nap_s(self) -> float:
        """As any loop's."""
        return LONGEST_NAP_S

    def channels(self) -> list[Channel]:
        """None."""
        return []

    def close(self) -> None:
        """Say in the status file how it ended, where that is not said yet: an end that nobody asked for is a failure."""
        self._keeper.close()
        if self._ending is None:
            self._live.finish(EndJob(self._rank_problem(), "failed"))

    # --- decisions --------------------------------------------------------------------------------------------------

    def _decide(self, event: AnyEvent, now: float) -> None:
        if self._ending is not None:
            return
        if _is_progress(event):
            self._moved = now
        if self._recorded is not None:
            self._recorded.event(event, now)
        commands = cast(list[AnyCommand], self._controller.handle(event, now))
        if self._recorded is not None:
            self._recorded.commands(commands, now)
        self._live.hear(event, now)
        for command in commands:
            self._carry_out(command, now)

    def _carry_out(self, command: AnyCommand, now: float) -> None:
        send = self._rank.mail.send
        match command:
            case Generate():
                for spec in command.trajectories:
                    self._store.assign(spec, command.rank, command.incarnation)
                send(command.rank, command)
            case Pull() | Attach() | HandOver() | Interrupt():
                send(command.rank, command)
            case Checkpoint():
                self._save(command)
            case Commit():
                if self._recorded is not None:
                    self._recorded.flush()
                self._keeper.commit(command.step, command.serial)
            case Abandon():
                say(f"no checkpoint of step {command.step}: {command.reason}", error=True)
                self._keeper.abandon(command.step, command.serial)
            case RestartTrainers():
                self._restart_trainers(command)
            case Train() | Publish() | Release():
                for trainer in self._trainers:
                    send(trainer, command)
            case Broadcast():
                for relay in command.chain:
                    send(relay, command)
            case Drop():
                for relay in self._rank.ranks_of(Role.RELAY):
                    send(relay, command)
            case Forget():
                self._epoch += 1
                self._epoch_of[command.rank] = self._epoch
                for rank in self._others:
                    if rank != command.rank:
                        send(rank, Lost(command.rank, self._epoch))
            case Sever():
                self._epoch += 1
                send(command.rank, Lost(command.source, self._epoch))
                send(command.source, Lost(command.rank, self._epoch))
            case TakeOver():
                self._take_over(command)
            case Readmit():
                self._silent.discard(command.rank)
                send(command.rank, Readmitted(command.incarnation, self._epoch_of.get(command.rank, 0)))
            case Settle():
                self._settle(command)
            case ReportStep() | ReportEvaluation():
                self._live.report(command, now)
            case EndJob():
                self._end(command, now)

    def _fetch(self, message: Fetch) -> None:
        """Answer a trainer, and a rollout that may still go on with what it asks for.

        One that was taken for lost may have been given it before and ask when others have it, or when it is settled; it
        begins anew when it hears so. After the end all payload is dropped.
        """
        rollout = self._rank.placements[message.rank].role is Role.ROLLOUT
        if self._ending is None and not (rollout and not self._store.owns_all(message.rank, message.trajectories)):
            self._rank.mail.send(message.rank, self._store.fetch(message))

    def _settle(self, command: Settle) -> None:
        keep_tokens = self._rank.config.record.tokens and self._recorded is not None
        for outcome in command.trajectories:
            if keep_tokens and self._recorded is not None and outcome.state is State.CONSUMED:
                self._recorded.tokens(self._store.blocks(outcome.trajectory))
            self._store.drop(outcome.trajectory)
            self._live.forget(outcome.trajectory)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _stop(self, event: StopRequested, now: float) -> None:
        config = self._rank.config.checkpoint
        event = msgspec.structs.replace(event, save=event.save and config.on_stop)
        if event.save and self._stop_by is None:
            self._stop_by = now + config.grace_s
        self._decide(event, now)

    def _save(self, command: Checkpoint) -> None:
        keeper = self._keeper
        books, trajectories = self._controller.snapshot()
        payload = [list(self._store.blocks(trajectory)) for trajectory in sorted(trajectories)]
        keeper.write(command.step, command.serial, books, [blocks for blocks in payload if blocks])
        directory = keeper.directory(command.step, command.serial)
        for trainer in self._trainers:
            self._rank.mail.send(trainer, msgspec.structs.replace(command, directory=directory))

    def _restart_trainers(self, command: RestartTrainers) -> None:
        say(command.reason)
        resume, step, directory = self._rank.resume, command.step, ""
        if step is not None:
            directory = resume.directory if resume is not None and resume.step == step else self._keeper.place(step)
        for trainer in self._trainers:
            self._rank.mail.send(trainer, msgspec.structs.replace(command, directory=directory))

    def _resume(self, resume: Resume, now: float) -> None:
        """Take the payload over, and have the controller take its books over."""
        saved = open_checkpoint(resume.directory)
        data, books = read_books(saved)
        for blocks in read_payload(saved):
            own = self._rank.settings.first_version
            self._store.restore([relabelled(block, books.same_weights, own) for block in blocks])
        say(f"attempt {self._rank.attempt} goes on from the checkpoint of step {resume.step}, {resume.directory}")
        self._decide(Resumed(data, saved.manifest.clock_zero_unix_s - self._zero_unix_s), now)

    # --- the layout of the weights ----------------------------------------------------------------------------------

    def _measure_links(self, message: RelayReady) -> None:
        for relay, source in self._desk.relay_ready(message.rank):
            self._rank.mail.send(relay, MeasureLink(source))

    def _lay_out(self, now: float) -> None:
        """Tell everybody the layout as soon as it is complete; a link that is not measured by then is not waited for long."""
        if self._desk.layout is not None:
            return
        layout = self._desk.make(patient=now < LINKS_S)
        if layout is None:
            return
        if self._recorded is not None:
            self._recorded.image_nbytes = layout.manifest.nbytes
        for role in (Role.TRAINER, Role.RELAY, Role.ROLLOUT):
            for rank in self._rank.ranks_of(role):
                self._rank.mail.send(rank, layout)

    def _take_over(self, command: TakeOver) -> None:
        """A spare becomes a relay: from now on it counts as one."""
        self._rank.promote(command.rank)
        self._silent.discard(command.rank)
        if self._desk.layout is not None:
            self._rank.mail.send(command.rank, self._desk.layout)
        self._rank.mail.send(command.rank, command)

    # --- watchdogs --------------------------------------------------------------------------------------------------

    def _hear(self, source: int, beat: Heartbeat, now: float) -> None:
        self._beats[source] = (now, beat)
        if source not in self._silent:
            return
        role = self._rank.placements[source].role
        if role in (Role.ROLLOUT, Role.SPARE):
            self._silent.discard(source)
        if role is Role.ROLLOUT:
            self._rank.mail.send(source, StartOver(self._epoch_of[source]))
        elif source not in self._heard_again:  # its node may have another relay by now, and not need it
            self._heard_again.add(source)
            self._decide(RankHeard(source, self._controller.incarnation_of(source)), now)

    def _bury(self, now: float) -> None:
        """Ranks that MPI has found dead."""
        for rank in self._rank.mail.lost():
            if rank in self._left:
                continue
            self._left.add(rank)
            self._beats.pop(rank, None)
            self._silent.discard(rank)
            self._lose(rank, "its process is gone", now)
        rollouts = self._rank.ranks_of(Role.ROLLOUT)
        if (self._left | self._silent).issuperset(rollouts):
            self._decide(JobFailed("failed", f"no rollout is left: ranks {rollouts} are gone, or say nothing"), now)

    def _watch_relays(self, now: float) -> None:
        """A relay that says nothing holds up all those behind it, so it is waited for less long than others are.

        But not before its first version: until then it may be busy with memory, for longer than any chunk takes. And not
        where nobody could take its place: a file system or a crowded node may hold all relays up for seconds, and a chain
        cannot be repaired around the last one.
        """
        for rank in self._rank.ranks_of(Role.RELAY):
            if rank in self._left or rank in self._silent or rank not in self._beats:
                continue
            config, silent_s = self._rank.config, now - self._beats[rank][0]
            patient = rank not in self._proven or self._controller.ends_without_relay(rank)
            bound_s = config.job.silence_timeout_s if patient else config.weights.relay_timeout_s
            if silent_s > bound_s:
                self._proven.discard(rank)
                self._give_up_on(rank, silent_s, now)

    def _give_up_on(self, rank: int, silent_s: float, now: float) -> None:
        """Take a rank for lost, until it is heard again."""
        self._silent.add(rank)
        self._heard_again.discard(rank)
        self._rank.mail.forget(rank)
        self._lose(rank, f"it has said nothing for {silent_s:.1f} s", now)

    def _lose(self, rank: int, reason: str, now: float) -> None:
        role, incarnation = self._rank.placements[rank].role.value, self._controller.incarnation_of(rank)
        self._decide(RankLost(rank, incarnation, f"{self._name(rank)}: {reason}", role), now)
        if role == Role.ROLLOUT.value:  # of relays the controller says who has to know
            self._epoch += 1
            self._epoch_of[rank] = self._epoch
            for relay in self._rank.ranks_of(Role.RELAY):
                self._rank.mail.send(relay, Lost(rank, self._epoch))

    def _name(self, rank: int) -> str:
        placement = self._rank.placements[rank]
        return f"rank {rank} ({placement.role.value} {placement.index} on {placement.node})"

    def _watch(self, now: float) -> None:
        job = self._rank.config.job
        for rank in self._others:
            if rank in self._left or rank in self._silent:
                continue
            heard = self._beats[rank][0] if rank in self._beats else 0.0
            bound = job.silence_timeout_s if rank in self._beats else job.start_timeout_s
            role = self._rank.placements[rank].role
            if now - heard > bound and (role is Role.ROLLOUT or (role is Role.SPARE and rank in self._beats)):
                self._give_up_on(rank, now - heard, now)
            elif now - heard > bound:
                text = f"{self._name(rank)} has said nothing for {now - heard:.0f} s"
                self._decide(JobFailed("failed", text), now)
                return
        bound = job.stall_timeout_s if self._controller.started else job.start_timeout_s
        if now - self._moved > bound:
            self._print_waits(now)
            text = f"nothing has moved for {now - self._moved:.0f} s; {self._waits_line()}"
            self._decide(JobFailed("stalled", text), now)

    def _waits_line(self) -> str:
        waits = self._controller.waits()
        return waits[0] if waits else "the controller waits for nobody"

    def _print_waits(self, now: float) -> None:
        """Who waits for whom, on stderr: by the controller's books, and by what each rank says itself."""
        lines = [f"nothing has moved for {now - self._moved:.0f} s. Who waits for whom:"]
        lines += [f"  controller: {line}" for line in self._controller.waits()]
        for rank in self._others:
            placement = self._rank.placements[rank]
            name = f"  rank {rank} ({placement.role.value} {placement.index} on {placement.node})"
            if rank not in self._beats:
                lines.append(f"{name} has never said anything")
                continue
            heard, beat = self._beats[rank]
            what = f"waits for {beat.waiting_for}, {beat.since_s:.0f} s so far" if beat.waiting_for else "is at work"
            lines.append(f"{name} {what} (heard {now - heard:.0f} s ago)")
            if self._recorded is not None:
                self._recorded.waits(now, rank, beat.waiting_for, beat.since_s)
        say("\n".join(lines), error=True)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _end(self, command: EndJob, now: float) -> None:
        if self._ending is not None:
            return
        self._ending = command
        self._ending_since = now
        if self._recorded is not None:
            self._recorded.ended(command, now)
        self._live.finish(command)
        self.clean = not self._left and not self._silent
        for rank in self._others:
            self._rank.mail.send(rank, Shutdown(clean=self.clean))

    def _farewell(self, now: float) -> bool:
        """Wait for the others to leave, but not for ever."""
        self._left.update(self._rank.mail.lost())
        if len(self._left | self._silent) == len(self._others) or now - self._ending_since > FAREWELL_S:
            self.done = True
        return False

    def _rank_problem(self) -> str:
        return "the launcher is gone" if self._rank.parent_is_gone() else "the manager failed; see its log"


def _is_progress(event: AnyEvent) -> bool:
    """Whether an event says that the job moves, and not merely that a rank lives, or what it waits for in vain."""
    match event:
        case RankHeard() | LinkStalled():
            return False
        case RankLost():
            return event.role != Role.SPARE.value
        case Streamed():
            return bool(event.progress)
        case _:
            return True
