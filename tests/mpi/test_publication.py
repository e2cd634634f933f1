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
    versions, arguments = 6, (1_500_000, 65_536)
    ended = run_mpi(1 + trainers + 2 * relays, "publication.py", transport, trainers, relays, versions, *arguments)
    assert ended.code == 0, ended.output
    assert ended.lines() == [
        f"published {versions} loaded by {relays} the last one {versions - 1}",
        *["relay has the last one whole"] * relays,
    ]


def test_images_of_a_few_bytes_and_more_trainers_than_chunks() -> None:
    ended = run_mpi(1 + 3 + 4, "publication.py", "mpi", 3, 2, 4, 1, 128)
    assert ended.code == 0, ended.output
    assert ended.lines()[0] == "published 4 loaded by 2 the last one 3"
