"""The partial-response pool: every trajectory that has begun and is not settled yet, without its tokens.

    GENERATING <-> AT_TOOL          owned by one rollout in one incarnation
    GENERATING, AT_TOOL -> WAITING  the owner is lost, or has handed it over; what it streamed is kept
    WAITING -> GENERATING           another rollout of the same version has taken it over, or of any, where versions mix
    GENERATING, AT_TOOL -> FINISHED no owner any more; it waits for its group, then for a batch

Invariants: a trajectory has an owner exactly while it is GENERATING or AT_TOOL, and one only. Its version is that under which it
began, and its tokens come from that one alone, unless the pipeline mixes versions: then those of training may come from newer
ones too. Its streamed tokens never become fewer. Ids are consecutive and never used again.
"""

from __future__ import annotations

from collections import deque

import msgspec

from laminar_hpc.control.prompts import Group
from laminar_hpc.protocol.events import Finished, Progress
from laminar_hpc.protocol.trajectory import Purpose, Segment, Source, State, Stop, TrajectorySpec, Verdict


class Owner(msgspec.Struct, frozen=True):
    """A rollout rank in one of its incarnations."""

    rank: int
    incarnation: int


class Trajectory(msgspec.Struct, eq=False):
    """One trajectory. `tokens` are response tokens streamed so far; `rank` is that of its last owner.

    `score` is the reward without a penalty for length, `told_s` when its owner last told of tokens (None: it has not),
    `delayed_s` by how much later it is expected to end for its moves and those of others onto its rollout. `newest_version` is
    the one that it goes on under (None: its own), `spans` the number of versions that its tokens come from, the last of which
    it has been under since it had `span_begun` tokens. It was taken up again `resumes` times, with `resumed_tokens` response
    tokens in all, which were prefilled.
    """

    id: int
    group: int
    prompt: int
    sample: int
    purpose: Purpose
    seed: int
    version: int
    begun_s: float
    owner: Owner | None
    rank: int
    state: State = State.GENERATING
    tokens: int = 0
    prompt_tokens: int = 0
    stop: Stop | None = None
    verdict: Verdict | None = None
    reward: float = 0.0
    score: float = 0.0
    finished_s: float | None = None
    staleness_finish: int | None = None
    told_s: float | None = None
    delayed_s: float = 0.0
    newest_version: int | None = None
    spans: int = 1
    span_begun: int = 0
    resumes: int = 0
    resumed_tokens: int = 0

    @property
    def current_version(self) -> int:
        """The version under which it is generated now, or was last."""
        return self.version if self.newest_version is None else self.newest_version

    @property
    def prefilled_tokens(self) -> int:
        """Tokens that were prefilled again where it was taken up; the prompt's count once it has finished."""
        return self.resumed_tokens + self.resumes * self.prompt_tokens

    @property
    def segments(self) -> list[Segment]:
        """What it consists of so far, as the store has it; the prompt's length is known once it has finished."""
        segments = []
        if self.prompt_tokens:
            segments.append(Segment(Source.PROMPT, self.prompt_tokens))
        if self.tokens:
            segments.append(Segment(Source.MODEL, self.tokens, self.current_version))
        return segments

    @property
    def spec(self) -> TrajectorySpec:
        """What a rollout needs to begin it or to go on with it."""
        return TrajectorySpec(
            self.id, self.group, self.prompt, self.sample, self.purpose, self.seed, resume_tokens=self.tokens
        )


class Advance(msgspec.Struct, frozen=True):
    """Tokens that one trajectory has gained in this time."""

    tokens: int
    seconds: float


class TrajectoryPool:
    """Keeps the trajectories, and those without an owner by their version, or, where that does not matter, all together."""

    def __init__(self, first_id: int = 0, mixes: bool = False) -> None:
        """`mixes`: training trajectories may go on under another version."""
        self._next_id = first_id
        self._mixes = mixes
        self.trajectories: dict[int, Trajectory] = {}
        """By id, in the order in which they began."""
        self._orphans: dict[int, deque[int]] = {}
        self._mixed: dict[int, deque[int]] = {}
        """Those that any version may go on with that is not older than the one they were under, which is the key."""

    def restore(self, trajectories: list[Trajectory]) -> None:
        """Take over trajectories of an earlier attempt, which nobody owns."""
        for trajectory in trajectories:
            trajectory.owner = trajectory.told_s = None
            self.trajectories[trajectory.id] = trajectory

    def begin(self, group: Group, sample: int, seed: int, version: int, owner: Owner, now: float) -> Trajectory:
        """A new trajectory, owned at once."""
        trajectory = Trajectory(
            self._next_id,
            group.id,
            group.prompt,
            sample,
            group.purpose,
            seed,
            version,
            now,
            owner,
            owner.rank,
        )
        self._next_id += 1
        self.trajectories[trajectory.id] = trajectory
        return trajectory

    def owned(self, id: int, rank: int) -> Trajectory | None:
        """The trajectory if rank `rank` owns it."""
        trajectory = self.trajectories.get(id)
        if trajectory is None or trajectory.owner is None or trajectory.owner.rank != rank:
            return None
        return trajectory

    def stream(self, progress: list[Progress], rank: int, now: float) -> Advance | None:
        """Note how far trajectories of `rank` have come; what it does not own, or what is old news, is passed over.

        What the one has gained that gained most, since it was last told of (None: of none was told before).
        """
        trajectories, advance, since_s = self.trajectories, 0, 0.0
        for item in progress:
            trajectory = trajectories.get(item.trajectory)
            if trajectory is None or trajectory.owner is None or trajectory.owner.rank != rank:
                continue
            gained = item.tokens - trajectory.tokens
            if gained > 0:
                trajectory.tokens = item.tokens
                if gained > advance and trajectory.told_s is not None:
                    advance, since_s = gained, trajectory.told_s
                trajectory.told_s = now
        return Advance(advance, now - since_s) if advance else None

    def go_to_tool(self, id: int, rank: int) -> None:
        """The trajectory waits for a tool."""
        trajectory = self.owned(id, rank)
        if trajectory is not None:
            trajectory.state = State.AT_TOOL

    def come_from_tool(self, id: int, rank: int) -> None:
        """The trajectory goes on."""
        trajectory = self.owned(id, rank)
        if trajectory is not None:
            trajectory.state = State.GENERATING

    def finish(self, trajectory: Trajectory, event: Finished, staleness: int, now: float) -> None:
        """The trajectory has ended and was graded."""
        trajectory.owner = None
        trajectory.state = State.FINISHED
        trajectory.tokens = event.response_tokens
        trajectory.prompt_tokens = event.prompt_tokens
        trajectory.stop = event.stop
        trajectory.verdict = event.verdict
        trajectory.reward = event.reward if event.verdict is Verdict.GRADED else 0.0
        trajectory.score = trajectory.reward if event.score is None else event.score
        trajectory.finished_s = now
        trajectory.staleness_finish = staleness

    def orphan(self, ids: list[int]) -> None:
        """The owner of these is lost, or has given them up."""
        for id in ids:
            trajectory = self.trajectories[id]
            trajectory.owner = None
            trajectory.state = State.WAITING
            waiting = self._mixed if self._mixes and trajectory.purpose is Purpose.TRAIN else self._orphans
            waiting.setdefault(trajectory.current_version, deque()).append(id)

    def has_orphans(self, version: int) -> bool:
        """Whether trajectories wait for an owner that holds this version and no other."""
        return version in self._orphans

    def has_work(self, version: int | None) -> bool:
        """Whether trajectories wait that an owner who holds this version can go on with."""
        return version is not None and (version in self._orphans or self._oldest_mixed(version) is not None)

    def _oldest_mixed(self, version: int) -> int | None:
        oldest = min(self._mixed, default=None)
        return oldest if oldest is not None and oldest <= version else None

    def waiting_tokens(self, version: int) -> int:
        """Tokens that those of this version which wait for an owner have, as far as they were streamed."""
        return sum(self.trajectories[id].tokens for id in self._orphans.get(version, ()))

    def adopt(self, version: int, owner: Owner) -> Trajectory | None:
        """Give the trajectory that has waited longest, of this version first, to `owner`; None where none waits."""
        key, orphans = (
            (version, self._orphans) if version in self._orphans else (self._oldest_mixed(version), self._mixed)
        )
        if key is None:
            return None
        trajectory = self.trajectories[orphans[key].popleft()]
        if not orphans[key]:
            del orphans[key]
        return self.pass_on(trajectory.id, owner, version)

    def pass_on(self, id: int, owner: Owner, version: int) -> Trajectory:
        """Give a trajectory, whose last owner has let go of it, to `owner`, who holds `version`."""
        trajectory = self.trajectories[id]
        if trajectory.tokens:
            trajectory.resumes += 1
            trajectory.resumed_tokens += trajectory.tokens
        if version != trajectory.current_version:
            trajectory.spans += trajectory.tokens > trajectory.span_begun
            trajectory.newest_version, trajectory.span_begun = version, trajectory.tokens
        trajectory.owner = owner
        trajectory.rank = owner.rank
        trajectory.told_s = None
        trajectory.state = State.GENERATING
        return trajectory

    def abandon(self, version: int) -> list[Trajectory]:
        """Take out of the queue all trajectories of this version that wait: nobody will go on with them."""
        return [self.trajectories[id] for id in self._orphans.pop(version, ())]

    def remove(self, id: int) -> Trajectory:
        """The trajectory is settled."""
        return self.trajectories.pop(id)
