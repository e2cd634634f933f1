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


class TrainOn(str, Enum):
    """What a training step may be made of."""

    COHORT = "cohort"
    """The prompts handed out for this step, all of them."""
    ANY_GROUP = "any_group"
    """Whichever groups are finished."""


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline.

    `cohorts_ahead` bounds the hand-out by whole steps (None: `control.ahead` of the config bounds it instead).
    `staleness_bound` is what the pipeline guarantees at consumption, in versions (None: none, it is measured).
    """

    name: str
    refresh: Refresh
    train_on: TrainOn
    cohorts_ahead: int | None
    staleness_bound: int | None


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            name="sync",
            refresh=Refresh.TOGETHER,
            train_on=TrainOn.COHORT,
            cohorts_ahead=0,
            staleness_bound=0,
        ),
        Mode(
            name="laminar",
            refresh=Refresh.OWN_BOUNDARY,
            train_on=TrainOn.ANY_GROUP,
            cohorts_ahead=None,
            staleness_bound=None,
        ),
    )
}
