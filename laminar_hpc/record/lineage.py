"""Which weights each trajectory was generated under, by the recorded commands and events themselves.

The outcomes in `trajectories` are the controller's own account. This is the evidence beside it: what rollouts were told
to generate and what they said they had, message by message.
"""

from __future__ import annotations

import msgspec

from laminar_hpc.protocol.commands import Generate
from laminar_hpc.protocol.events import Finished
from laminar_hpc.protocol.wire import decode
from laminar_hpc.record.reader import Run


class Lineage(msgspec.Struct):
    """`ordered` has the versions under which the tokens of a trajectory were ordered, `finished` the version under which a
    rollout said it had finished, by attempt and trajectory."""

    ordered: dict[tuple[int, int], set[int]] = {}
    finished: dict[tuple[int, int], int] = {}


def read_lineage(run: Run) -> Lineage:
    """The lineage of all trajectories; empty where the run kept no events.

    An order that starts from the prompt replaces those before it: none of their tokens is left.
    """
    lineage = Lineage()
    for attempt in run.attempts:
        for logged in run.commands(attempt):
            command = decode(logged.data)
            if isinstance(command, Generate):
                for spec in command.trajectories:
                    before = lineage.ordered.get((attempt, spec.id), set()) if spec.resume_tokens else set()
                    lineage.ordered[attempt, spec.id] = before | {command.version}
        for logged in run.events(attempt):
            event = decode(logged.data)
            if isinstance(event, Finished):
                lineage.finished[attempt, event.trajectory] = event.version
    return lineage
