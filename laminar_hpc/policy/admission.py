"""Back-pressure: how many more prompts may be handed out now.

`open_groups` are those in flight and in the buffer, `in_flight` those that are not generated yet; `kept` are all that were
ever handed out less the discarded ones, so it counts what has been trained on, what is in training and what is open. The run
needs `steps * prompts` groups and not one more: whatever is discarded makes room for its replacement, and nothing is left
over at the end.
"""

from __future__ import annotations

import math

from laminar_hpc.policy.modes import Mode


def room(
    mode: Mode,
    *,
    steps: int,
    prompts: int,
    ahead: float,
    kept: int,
    open_groups: int,
    in_flight: int,
    step_held: int | None,
    most_kept: int | None = None,
) -> int:
    """Prompts that may be handed out now.

    `prompts` is the number of groups of one step, `ahead` how many steps' worth may be open beyond one where the mode
    counts no cohorts, and `step_held` the step of the weights that all rollouts hold together (None: not together).
    `most_kept` is what `kept` may come to (staleness.capacity; None: staleness has no part in it).
    """
    needed = steps * prompts if most_kept is None else min(steps * prompts, most_kept)
    if mode.cohorts_ahead is None:
        limit = needed if mode.waits else kept - open_groups + math.floor((1 + ahead) * prompts)
        return max(0, min(limit, needed) - kept)
    if step_held is None:
        return 0
    cohorts = step_held + 1 + mode.cohorts_ahead
    generated = (kept - in_flight) // prompts
    return max(0, min(cohorts * prompts, (generated + 1) * prompts, needed) - kept)
