"""The overlong penalty: values of equation 13 of arXiv 2503.14476, worked out by hand."""

from __future__ import annotations

import pytest

from laminar_hpc.tasks.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [
        (0, 0.0),
        (16384, 0.0),  # L_max - L_cache = 20480 - 4096, the paper's own setting
        (16385, -1 / 4096),
        (17408, -0.25),  # (16384 - 17408) / 4096
        (18432, -0.5),
        (20480, -1.0),
        (20481, -1.0),
        (99999, -1.0),
    ],
)
def test_the_papers_setting(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, max_tokens=20480, interval_tokens=4096) == penalty


@pytest.mark.parametrize("tokens", [0, 5, 10, 11])
def test_off_by_default(tokens: int) -> None:
    assert overlong_penalty(tokens, max_tokens=10, interval_tokens=0) == 0.0


def test_the_interval_may_be_all_of_the_response() -> None:
    assert [overlong_penalty(tokens, 4, 4) for tokens in range(5)] == [0.0, -0.25, -0.5, -0.75, -1.0]
