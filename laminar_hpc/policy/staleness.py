"""How old a trajectory is, and how old a pipeline lets it become.

A version counts as published when every trainer holds its share of it. There is one for each step (a resumed run publishes the
weights of its checkpoint again, under another id, which makes nothing older), so what was published after the version that
generated a trajectory is counted by a difference of steps.

The bound. Let all rollouts refresh together, and let the cohort handed out under the weights after step s hold the prompts
of step s + 1 + a, where a is `cohorts_ahead`. A trajectory of it is consumed when the batch of step s + 1 + a forms, and
then the newest version is the one after step s + a. So it is at most (s + a) - s = a versions old, and exactly a unless a
replacement was generated later. Rollouts that refresh alone have no such bound: one long trajectory may outlive any number
of steps. Only an eviction that throws away what has become older than m versions bounds them, at m.
"""

from __future__ import annotations

from laminar_hpc.policy.modes import Mode


def staleness(step: int, newest_step: int) -> int:
    """How many steps' weights were published after those of `step`, the newest being those of `newest_step`."""
    return newest_step - step


def bound(mode: Mode, evicted_above: int | None = None) -> int | None:
    """The highest staleness at consumption (None: there is no bound).

    `evicted_above` is the staleness above which finished groups are thrown away (None: never).
    """
    bounds = [limit for limit in (mode.cohorts_ahead, evicted_above) if limit is not None]
    return min(bounds, default=None)
