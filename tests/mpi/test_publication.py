"""Versions from trainers through relays to rollouts, between real ranks; the program checks every digest."""

from __future__ import annotations

import importlib.util

import pytest
from mpirun import run_mpi

pytestmark = pytest.mark.mpi

NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="nixl is not installed")
)


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("relays", [1, 3])
@pytest.mark.parametrize("transport", ["mpi", NIXL])
def test_all_rollouts_load_what_was_published(transport: str, relays: int, trainers: int) -> None:
    versions, arguments = 6, (1_500_000, 65_536, 0)
    ended = run_mpi(1 + trainers + 2 * relays, "publication.py", transport, trainers, relays, versions, *arguments)
    assert ended.code == 0, ended.output
    assert ended.lines() == [
        f"published {versions} loaded by {relays} the last one {versions - 1}",
        *["relay has the last one whole"] * relays,
    ]


def test_images_of_a_few_bytes_and_more_trainers_than_chunks() -> None:
    ended = run_mpi(1 + 3 + 4, "publication.py", "mpi", 3, 2, 4, 1, 128, 0)
    assert ended.code == 0, ended.output
    assert ended.lines()[0] == "published 4 loaded by 2 the last one 3"


def test_a_version_on_loan_holds_up_neither_trainers_nor_other_rollouts() -> None:
    versions = 8
    ended = run_mpi(1 + 2 + 4 + 1, "publication.py", "mpi", 2, 2, versions, 300_000, 65_536, 1)
    assert ended.code == 0, ended.output
    first, *others = ended.lines()
    assert first == f"published {versions} loaded by 2 the last one {versions - 1}"
    assert sum("slow one still has" in line for line in others) == 1


@pytest.mark.slow
def test_an_image_beyond_what_one_message_of_mpi_can_be() -> None:
    """2.2 GB, more than the 2**31 - 1 bytes that a count of MPI's reaches."""
    ended = run_mpi(1 + 1 + 2, "publication.py", "mpi", 1, 1, 1, 2_200_000_000, 33_554_432, 0, timeout_s=200.0)
    assert ended.code == 0, ended.output
    assert ended.lines()[0] == "published 1 loaded by 1 the last one 0"
