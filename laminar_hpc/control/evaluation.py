"""Evaluation rounds: the held-out prompts, answered by one version beside training.

    OPEN -> BEGUN (the first rollout that draws from it binds it to its version) -> complete, reported, forgotten
    BEGUN -> OPEN (nobody holds that version any more: all prompts are answered again, by another one)

Invariants: all responses of a reported round come from one version, which is not older than the one the round was opened
for. A rollout draws from a round that is bound to its version before it begins another, oldest first: so a round that was
begun ends, also when an older one has to start over in the meantime and another version takes that one.
"""

from __future__ import annotations

from collections import deque

import msgspec


class Round(msgspec.Struct, eq=False):
    """One evaluation, opened for `version`. `pending` are the prompts that nobody answers yet.

    `answered_by` is the version that it is bound to, `groups` has the group of each prompt handed out so far, and
    `unfinished` counts the prompts without a finished response.
    """

    version: int
    prompts: int
    pending: deque[int]
    unfinished: int
    answered_by: int | None = None
    groups: dict[int, int] = {}


class Rounds:
    """The rounds that are not reported yet, oldest first."""

    def __init__(self) -> None:
        self.open_rounds: list[Round] = []
        self._of_group: dict[int, Round] = {}

    def open(self, version: int, prompts: int) -> None:
        """`version` is to be evaluated on this many held-out prompts."""
        self.open_rounds.append(Round(version, prompts, deque(range(prompts)), prompts))

    @property
    def handing_out(self) -> Round | None:
        """The oldest round that has prompts left to hand out."""
        return next((one for one in self.open_rounds if one.pending), None)

    def drawable(self, version: int) -> Round | None:
        """The round that a rollout holding `version` may draw from now: one that is bound to it, else the oldest free one."""
        pending = [one for one in self.open_rounds if one.pending]
        bound = next((one for one in pending if one.answered_by == version), None)
        if bound is not None:
            return bound
        free = next((one for one in pending if one.answered_by is None), None)
        return free if free is not None and version >= free.version else None

    def draw(self, one: Round, version: int) -> int:
        """Hand out the next prompt of a round, which from now on is `version`'s."""
        one.answered_by = version
        return one.pending.popleft()

    def note_group(self, one: Round, prompt: int, group: int) -> None:
        """`group` is the hand-out of `prompt` in this round."""
        one.groups[prompt] = group
        self._of_group[group] = one

    def finish(self, group: int) -> Round | None:
        """The response of this group has finished; the round, if that was the last one, which is then forgotten."""
        one = self._of_group[group]
        one.unfinished -= 1
        if one.unfinished:
            return None
        self.open_rounds.remove(one)
        for number in one.groups.values():
            del self._of_group[number]
        return one

    def bound_to(self, version: int) -> list[Round]:
        """The rounds that this version answers."""
        return [one for one in self.open_rounds if one.answered_by == version]

    def start_over(self, one: Round) -> None:
        """All prompts of the round are to be answered again."""
        one.pending = deque(range(one.prompts))
        one.unfinished = one.prompts
        one.answered_by = None
