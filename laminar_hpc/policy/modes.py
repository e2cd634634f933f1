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


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline.

    `cohorts_ahead` bounds the hand-out by whole steps (None: `control.ahead` of the config bounds it instead). `repack`:
    rollouts in their tail may give their trajectories to others of their version.
    What a pipeline guarantees follows from it: `staleness.bound`.
    """

    name: str
    refresh: Refresh
    cohorts_ahead: int | None
    repack: bool


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(name="sync", refresh=Refresh.TOGETHER, cohorts_ahead=0, repack=False),
        Mode(name="laminar", refresh=Refresh.OWN_BOUNDARY, cohorts_ahead=None, repack=True),
    )
}
