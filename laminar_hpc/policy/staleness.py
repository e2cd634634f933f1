"""How old a trajectory is, and how old a pipeline lets it become.

A version counts as published when every trainer holds its share of it. There is one for each step (a resumed run publishes the
weights of its checkpoint again, under another id, which makes nothing older), so what was published after the version that
generated a trajectory is counted by a difference of steps.

The bound. Let all rollouts refresh together, and let the cohort handed out under the weights after step s hold the prompts
of step s + 1 + a, where a is `cohorts_ahead`. A trajectory of it is consumed when the batch of step s + 1 + a forms, and
then the newest version is the one after step s + a. So it is at most (s + a) - s = a versions old, and exactly a unless a
replacement was generated later. Rollouts that refresh alone have no such bound: one long trajectory may outlive any number
of steps. Two things bound them at m versions: an eviction that throws away what has become older, or waiting.

Waiting, after AReaL (arXiv 2505.24298, section 5.1, equation 3): with B groups a step, one is handed out under the weights after
step i only while at most (i + 1 + m) * B have been. As many fit into the steps up to i + 1 + m, the last one that may take them,
if no step takes too many newer ones instead. So, when the newest weights are those after step s, and n groups of the weights
after step i or older are left, the next step takes at least n - (i + m - s) * B of these, for each i, and waits for those that
are still generated. (AReaL counts by the newest weights instead of the group's own, takes older ones first, and does not wait.)
"""

from __future__ import annotations

from laminar_hpc.policy.modes import Mode


def staleness(step: int, newest_step: int) -> int:
    """How many steps' weights were published after those of `step`, the newest being those of `newest_step`."""
    return newest_step - step


def owed(left: int, step: int, newest_step: int, most: int, prompts: int) -> int:
    """How many groups of the weights after `step`, or older, the next step has to take, lest any becomes staler than `most`.

    `left` is how many of them no step has taken, `prompts` how many a step takes. 0 or less: it need not take any.
    """
    return left - (step + most - newest_step) * prompts


def capacity(step: int, most: int, prompts: int) -> int:
    """How many groups may have been handed out, one of the weights after `step` included, where none may be staler than `most`.

    Discarded ones do not count.
    """
    return (step + 1 + most) * prompts


def waited_for(mode: Mode, eviction: str, max_staleness: int) -> int | None:
    """The staleness at consumption that steps wait not to exceed; None where they do not wait."""
    return max_staleness if eviction == "wait" or mode.waits else None


def bound(mode: Mode, evicted_above: int | None = None, most: int | None = None) -> int | None:
    """The highest staleness at consumption (None: there is no bound).

    `evicted_above` is the staleness above which finished groups are thrown away (None: never), `most` that which steps wait
    not to exceed (None: they do not).
    """
    bounds = [limit for limit in (mode.cohorts_ahead, evicted_above, most) if limit is not None]
    return min(bounds, default=None)
