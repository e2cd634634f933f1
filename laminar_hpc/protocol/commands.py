"""What the controller asks for. Each command carries the reason for it, so that the log explains itself."""

from __future__ import annotations

import msgspec

from laminar_hpc.protocol.trajectory import Purpose, State, Stop, TrajectorySpec, Verdict


class Command(msgspec.Struct, frozen=True, tag=True):
    """Base of all commands."""

    reason: str


class Generate(Command, frozen=True):
    """Rollout `rank` generates these trajectories with the weights it holds, which are `version`."""

    rank: int
    incarnation: int
    version: int
    trajectories: list[TrajectorySpec]


class HandOver(Command, frozen=True):
    """Rollout `rank` gives up these trajectories, for rollout `destination` to go on with them; `HandedOver` is the answer.

    `move` numbers the commands of this kind. What has ended by then, and is being graded, stays, and so does what has not
    come to its engine yet.
    """

    rank: int
    incarnation: int
    move: int
    destination: int
    trajectories: list[int]


class Pull(Command, frozen=True):
    """Rollout `rank` loads the newest version its relay holds, `version` at least.

    `exactly`: that one and no other, since trajectories wait for it; the answer is `PullRefused` where its relay has it no more.
    """

    rank: int
    incarnation: int
    version: int
    exactly: bool = False


class Interrupt(Command, frozen=True):
    """Rollout `rank` lets go of all that it generates, and keeps the place of each: it goes on under newer weights."""

    rank: int
    incarnation: int


class Sample(msgspec.Struct, frozen=True):
    """One trajectory of a training batch: who it is, what it earned, and which replica of the trainers (0 first) takes it."""

    trajectory: int
    group: int
    reward: float
    tokens: int
    replica: int


class Train(Command, frozen=True):
    """All trainers train on this mini-batch; `minibatches` is how many the step has.

    Every trainer gets the whole list: advantages need the rewards of whole groups, wherever their members are trained.
    """

    step: int
    minibatch: int
    minibatches: int
    samples: list[Sample]


class Publish(Command, frozen=True):
    """All trainers publish their weights as `version`, as they are after `step` (0: the checkpoint's)."""

    version: int
    step: int


class Checkpoint(Command, frozen=True):
    """All trainers write their state as it is after `step`, and the manager writes the controller's books and the payload.

    Each does so beside its work, into `directory`, which the manager names. It is the `serial`th that this attempt has begun,
    0 first: one step may have several, where an earlier one was given up. `committed` is the step of the newest complete one
    (None: there is none): what came before it is never trained again.
    """

    step: int
    serial: int
    committed: int | None = None
    directory: str = ""


class Commit(Command, frozen=True):
    """Every part of checkpoint `serial`, of `step`, is on disk: it is put into its place, and the oldest ones are removed."""

    step: int
    serial: int


class Abandon(Command, frozen=True):
    """Checkpoint `serial`, of `step`, cannot be completed: what there is of it is removed, and the job goes on."""

    step: int
    serial: int


class RestartTrainers(Command, frozen=True):
    """All trainers kill their workers and start others, the `worker`th after the first, in `delay_s`.

    Those begin with the checkpoint of `step` (None: with the model), in `directory`, which the manager names, and do again what
    the trainers were asked to do after it.
    """

    worker: int
    step: int | None
    delay_s: float
    directory: str = ""


class Share(msgspec.Struct, frozen=True):
    """Digests of trainer `rank`'s shard: one of its part of each chunk that has one, in order ("": verification is off)."""

    rank: int
    digests: bytes


class Broadcast(Command, frozen=True):
    """The relays fetch `version`: the first of `chain` from the trainers, each other one from the one before it.

    Sent again with another chain when the chain changes: each relay goes on with the chunks that it has.
    """

    version: int
    chain: list[int]
    shares: list[Share]


class Drop(Command, frozen=True):
    """Relays that do not hold `version` complete give it up: a newer one has overtaken it, or nobody has all of it."""

    version: int


class Release(Command, frozen=True):
    """The trainers may reuse the memory of `version`: no relay will fetch it from them any more."""

    version: int


class Forget(Command, frozen=True):
    """Rank `rank` is gone: all others forget what it had borrowed, asked for and was being sent."""

    rank: int


class Sever(Command, frozen=True):
    """Nothing comes from `source`, a relay or trainer, to relay `rank`: both forget what is between them.

    Each goes on with the others.
    """

    source: int
    rank: int


class Attach(Command, frozen=True):
    """Rollout `rank` pulls from relay `relay` from now on: out of its memory, or, `remote`, chunk by chunk from another node."""

    rank: int
    relay: int
    remote: bool


class TakeOver(Command, frozen=True):
    """The spare `rank` becomes the relay of its node."""

    rank: int


class Readmit(Command, frozen=True):
    """Relay `rank`, taken for lost, speaks again: it begins anew, empty, as `incarnation`."""

    rank: int
    incarnation: int


class TrajectoryOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a trajectory ended, with all that the record keeps of it. Times are in the clock of `now`.

    `state` is CONSUMED, DISCARDED or RETURNED (for evaluation CONSUMED means: counted in its accuracy). `staleness_*` count
    the versions published between the weights that generated it and the moment it finished, and was taken into a batch. Its
    tokens come from `spans` versions, from `version` to `newest_version`; so many tokens were prefilled again on the way.
    """

    trajectory: int
    group: int
    prompt: int
    sample: int
    purpose: Purpose
    state: State
    reason: str
    version: int | None
    newest_version: int | None
    spans: int
    prefilled_tokens: int
    rank: int | None
    prompt_tokens: int
    response_tokens: int
    reward: float
    verdict: Verdict | None
    stop: Stop | None
    begun_s: float
    finished_s: float | None
    settled_s: float
    staleness_finish: int | None
    staleness_consumption: int | None
    step: int | None


class GroupOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt that was handed out ended: CONSUMED once, DISCARDED or RETURNED, with the reason."""

    group: int
    prompt: int
    purpose: Purpose
    state: State
    reason: str
    version: int | None
    step: int | None
    trajectories: int
    handed_out_s: float
    settled_s: float


class Settle(Command, frozen=True):
    """These trajectories and prompts have ended: the record takes them, the store drops their payload."""

    trajectories: list[TrajectoryOutcome]
    groups: list[GroupOutcome]


class ReportStep(Command, frozen=True, kw_only=True):
    """A step is done. `metrics` are those of its mini-batches together; `train_s` is the sum of their times."""

    step: int
    version: int
    started_s: float
    finished_s: float
    train_s: float
    samples: int
    prompt_tokens: int
    response_tokens: int
    reward_mean: float
    reward_std: float
    staleness_finish_mean: float
    staleness_finish_max: int
    staleness_consumption_mean: float
    staleness_consumption_max: int
    metrics: dict[str, float]


class ReportMove(Command, frozen=True, kw_only=True):
    """What came of `HandOver` number `move`; the reason is the plan's. Times are in the clock of `now`.

    `ending` says in words what became of it. `trajectories` and `tokens` are those that another rollout has read again, for
    `prefill_s`. `gain_s` is what the move has gained, by the formula of the expectation (policy/repack.py) from the steps that
    were really left to both and from `prefill_s`; None where nothing was moved or its end was not seen. The source was
    empty at `released_s`, and had `loaded_version`, a newer one, at `loaded_s`.
    """

    move: int
    version: int
    source: int
    destination: int
    ending: str
    trajectories: int
    tokens: int
    planned_s: float
    handed_over_s: float | None
    resumed_s: float | None
    released_s: float | None
    loaded_s: float | None
    loaded_version: int | None
    prefill_s: float | None
    expected_gain_s: float | None
    gain_s: float | None


class ReportEvaluation(Command, frozen=True, kw_only=True):
    """The held-out prompts were answered by one version.

    `accuracy` is the share of graded responses with the full reward of 1.
    """

    version: int
    step: int
    prompts: int
    graded: int
    accuracy: float
    reward_mean: float
    response_tokens: int


class EndJob(Command, frozen=True):
    """The job is over. `outcome` is one of finished, stopped, requeue, failed, stalled; the reason is for people."""

    outcome: str


AnyCommand = (
    Generate
    | HandOver
    | Interrupt
    | Pull
    | Train
    | Publish
    | Checkpoint
    | Commit
    | Abandon
    | RestartTrainers
    | Broadcast
    | Drop
    | Release
    | Forget
    | Sever
    | Attach
    | TakeOver
    | Readmit
    | Settle
    | ReportStep
    | ReportMove
    | ReportEvaluation
    | EndJob
)
