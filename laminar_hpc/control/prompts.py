"""The prompts: in which order they are handed out, and what became of each hand-out.

A hand-out makes a group: the prompt, and the trajectories that answer it. Its number is never used again.

    OPEN -> TAKEN (a batch formed with it) -> CONSUMED (its step is done)
    OPEN -> CONSUMED       (evaluation: counted in a reported accuracy)
    OPEN -> DISCARDED      (with a reason; a training prompt then makes room for a replacement)
    OPEN, TAKEN -> RETURNED (the job ended first)

Invariants: a group is closed exactly once, and then forgotten except in the counts; handed out = open + taken + consumed +
discarded + returned. A group that starts over under another version stays the same group, with new trajectories.

Training prompts come in epochs, each in an order of its own that the seed fixes, whatever is handed out when. So which
prompt the n-th draw gives, and the noise its responses are sampled with, does not depend on the run's timing.
"""

from __future__ import annotations

import msgspec

from laminar_hpc.control.settings import Settings
from laminar_hpc.policy.keyed import permuted, stable_hash
from laminar_hpc.protocol.trajectory import Purpose, State


class Group(msgspec.Struct, eq=False):
    """One hand-out. `draw` numbers the training hand-outs and is the prompt for evaluation: it keys the sampling noise.

    `members` are the trajectories that count, `unfinished` how many of them are still generated. `version` is the one that
    generates them all (None: it waits for a rollout to start it over).
    """

    id: int
    purpose: Purpose
    prompt: int
    draw: int
    handed_out_s: float
    version: int | None = None
    members: list[int] = []
    unfinished: int = 0
    taken: bool = False


class PromptLedger:
    """Hands prompts out and keeps account of them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._next_group = settings.first_hand_out
        self._draws = 0
        self._taken = 0
        self.groups: dict[int, Group] = {}
        """Open and taken groups by number, in the order of the hand-out."""
        self.closed: dict[Purpose, dict[State, int]] = {
            purpose: dict.fromkeys((State.CONSUMED, State.DISCARDED, State.RETURNED), 0) for purpose in Purpose
        }
        """How many groups ended how."""

    @property
    def kept(self) -> int:
        """Training groups handed out, less the discarded ones."""
        return self._draws - self.closed[Purpose.TRAIN][State.DISCARDED]

    @property
    def open_groups(self) -> int:
        """Training groups in flight and in the buffer."""
        closed = self.closed[Purpose.TRAIN]
        return self.kept - self._taken - closed[State.CONSUMED] - closed[State.RETURNED]

    @property
    def draws(self) -> int:
        """How many training prompts were handed out."""
        return self._draws

    def restore(self, draws: int, closed: dict[Purpose, dict[State, int]], groups: list[Group]) -> None:
        """Go on from the books of an earlier attempt; `groups` are open."""
        self._draws = draws
        self.closed = {purpose: dict(counts) for purpose, counts in closed.items()}
        self.groups = {group.id: group for group in groups}

    def draw_training(self, now: float) -> Group:
        """Hand out the next training prompt."""
        settings = self._settings
        draw = self._draws
        self._draws += 1
        epoch, place = divmod(draw, settings.train_prompts)
        key = stable_hash(settings.seed, "prompt order", epoch)
        return self._hand_out(Purpose.TRAIN, permuted(place, settings.train_prompts, key), draw, now)

    def draw_evaluation(self, prompt: int, now: float) -> Group:
        """Hand out the held-out prompt `prompt`."""
        return self._hand_out(Purpose.EVALUATION, prompt, prompt, now)

    def _hand_out(self, purpose: Purpose, prompt: int, draw: int, now: float) -> Group:
        group = Group(self._next_group, purpose, prompt, draw, now)
        self._next_group += 1
        self.groups[group.id] = group
        return group

    def noise_seed(self, group: Group, sample: int) -> int:
        """What keys the sampling noise of a group's response number `sample`: 63 bits, wherever it is generated."""
        return stable_hash(self._settings.seed, group.purpose.value, group.draw, sample)

    def take(self, group: Group) -> None:
        """A batch has formed with this group."""
        assert not group.taken, f"group {group.id} was taken already"
        group.taken = True
        self._taken += 1

    def close(self, group: Group, state: State) -> None:
        """The group has ended as `state`."""
        del self.groups[group.id]
        self.closed[group.purpose][state] += 1
        if group.taken:
            self._taken -= 1
