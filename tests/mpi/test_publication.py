"""Versions from trainers through relays to rollouts, between real ranks; the program checks every digest."""

from __future__ import annotations

import pytest
from mpirun import run_mpi

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("relays", [1, 2, 3])
def test_all_rollouts_load_what_was_published(trainers: int, relays: int) -> None:
    versions = 6
    ended = run_mpi(1 + trainers + 2 * relays, "publication.py", trainers, relays, versions, 1_500_000, 65_536)
    assert ended.code == 0, ended.output
    assert ended.lines() == [
        f"published {versions} loaded by {relays} the last one {versions - 1}",
        *["relay has the last one whole"] * relays,
    ]


def test_images_of_a_few_bytes_and_more_trainers_than_chunks() -> None:
    ended = run_mpi(1 + 3 + 4, "publication.py", 3, 2, 4, 1, 128)
    assert ended.code == 0, ended.output
    assert ended.lines()[0] == "published 4 loaded by 2 the last one 3"
