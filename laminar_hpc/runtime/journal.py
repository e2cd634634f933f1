"""What a trainer's worker has been asked since a checkpoint, so that another one can be brought to where it was.

The next worker begins with the checkpoint and is asked for the same again, in the same order: it trains on the same
mini-batches and comes to the same weights (on GPUs but for the order of sums). What the manager has been told is not told
again, and a version that was written whole is not written again.
"""

from __future__ import annotations

from laminar_hpc.errors import EngineError
from laminar_hpc.protocol.peer import TrainOn, WriteWeights

MOST_SAVES = 5
"""Checkpoints in a row of which none was completed, as on a full disk: then what came before the last one is kept no more."""

GIVEN_UP = -1
"""Stands for the step since which all is kept, where no checkpoint is that far."""


class Asked:
    """A mini-batch to train on or a version to write; `told`: the manager knows, or will, that it is done."""

    def __init__(self, work: TrainOn | WriteWeights) -> None:
        self.work = work
        self.told = False


class Journal:
    """In the order in which the worker was asked; not used where there are no checkpoints to begin with."""

    def __init__(self, keeps: bool, step: int | None) -> None:
        """`step` is that of the checkpoint which the first worker begins with (None: with the model)."""
        self._keeps = keeps
        self._since: int | None = step
        self._entries: list[Asked | int] = []  # a number: the checkpoint of this step was asked for here

    def ask(self, work: TrainOn | WriteWeights) -> Asked:
        """The worker is asked for something."""
        asked = Asked(work)
        if self._keeps:
            self._entries.append(asked)
        return asked

    def save(self, step: int, committed: int | None) -> None:
        """It is asked for its state after `step`; what came before the checkpoint of step `committed` is needed no more."""
        if not self._keeps:
            return
        if committed in self._entries:
            self._forget_before(committed)
        self._entries.append(step)
        if sum(isinstance(entry, int) for entry in self._entries) > MOST_SAVES:
            self._entries, self._since = [step], GIVEN_UP

    def since(self, step: int | None) -> list[Asked]:
        """What another worker, which begins with the checkpoint of `step`, has to do; EngineError where that is not kept."""
        self._forget_before(step)
        asked = [entry for entry in self._entries if isinstance(entry, Asked)]
        return [one for one in asked if isinstance(one.work, TrainOn) or not one.told]

    def _forget_before(self, step: int | None) -> None:
        if step == self._since:
            return
        if step not in self._entries:
            raise EngineError(
                f"another worker cannot do again what came after step {step or 0}: it is kept no more, since none of the "
                f"last checkpoints was completed"
            )
        del self._entries[: self._entries.index(step) + 1]
        self._since = step
