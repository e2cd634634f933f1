"""Pipelines are rows: what tells one from another is data, and code asks for a switch, never for a mode's name."""

from __future__ import annotations

from enum import Enum

import msgspec


class Refresh(str, Enum):
    """When a rollout takes new weights."""

    TOGETHER = "together"
    """All rollouts at once, between two cohorts of prompts."""
    OWN_BOUNDARY = "own_boundary"
    """Each rollout alone, when it has finished its own batch."""
    INTERRUPTED = "interrupted"
    """Each rollout as soon as its relay has newer ones: what it generates is interrupted, and goes on under them."""


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline.

    `cohorts_ahead` bounds the hand-out by whole steps (None: `control.ahead` of the config bounds it instead): the cohort of
    a step is handed out under weights that are so many steps older than the newest that its step could have, and not
    before the cohort before it has been generated. `streams`: a step begins with the first mini-batch of its groups and
    takes the others as they finish, where otherwise all of its groups have to be there. `waits`: prompts are handed out, and
    steps begin, only as no group becomes staler than `control.max_staleness` (staleness.py), whatever `control.eviction`
    says. `repack`: rollouts in their tail may give their trajectories to others of their version. What a pipeline guarantees
    follows from it: `staleness.bound`.
    """

    name: str
    refresh: Refresh
    cohorts_ahead: int | None
    streams: bool = False
    waits: bool = False
    repack: bool = False

    @property
    def alternates(self) -> bool:
        """Whether nothing is generated while a step is trained on, so that trainers and rollouts may have the same GPUs."""
        return self.cohorts_ahead == 0

    @property
    def mixes(self) -> bool:
        """Whether the tokens of a trajectory may come from several versions."""
        return self.refresh is Refresh.INTERRUPTED


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(name="sync", refresh=Refresh.TOGETHER, cohorts_ahead=0),
        Mode(name="one_step", refresh=Refresh.TOGETHER, cohorts_ahead=1),
        Mode(name="stream", refresh=Refresh.TOGETHER, cohorts_ahead=1, streams=True),
        Mode(name="partial", refresh=Refresh.INTERRUPTED, cohorts_ahead=None, waits=True),
        Mode(name="laminar", refresh=Refresh.OWN_BOUNDARY, cohorts_ahead=None, repack=True),
    )
}
