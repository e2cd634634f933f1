"""When a trainer gives up on steps that train nothing."""

from __future__ import annotations

import pytest

from laminar_hpc.errors import EngineError
from laminar_hpc.protocol.peer import TrainOn
from laminar_hpc.trainer.worker import SKIPPED_STEPS, Patience


def note(patience: Patience, skipped: float, minibatches: int = 2) -> None:
    """A mini-batch of step 7."""
    patience.note(TrainOn(7, 0, minibatches, [], [], [], [], []), {"skipped": skipped})


@pytest.mark.parametrize(("run", "bound"), [(1000, SKIPPED_STEPS), (SKIPPED_STEPS, SKIPPED_STEPS), (3, 3), (1, 1)])
def test_it_ends_after_so_many_steps_in_a_row_or_all_of_a_shorter_run(run: int, bound: int) -> None:
    patience = Patience(run)
    for _ in range(2 * bound - 1):
        note(patience, 1.0)
    with pytest.raises(EngineError, match=f"nothing was trained in {bound} steps up to step 7: no gradient was finite"):
        note(patience, 1.0)


def test_one_mini_batch_that_trains_starts_the_count_again() -> None:
    patience = Patience(3)
    for _ in range(10):
        for _ in range(5):
            note(patience, 1.0)
        note(patience, 0.0)
