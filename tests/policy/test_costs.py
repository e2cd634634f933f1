"""Cost tables, by hand."""

from __future__ import annotations

import pytest

from laminar_hpc.policy.costs import Costs, Points, wrong_with

H800_32B = Points((1.0, 4.0, 128.0, 256.0), (0.0106, 0.0110, 0.0258, 0.0372))


def costs(**changed: float) -> Costs:
    numbers = {
        "step_overhead_s": 0.02,
        "prefill_call_s": 0.01,
        "prefill_token_s": 1e-4,
        "train_call_s": 0.5,
        "train_token_s": 1e-5,
        "publish_s": 0.6,
        "load_s": 0.5,
    }
    return Costs(decode=H800_32B, kv_cache_tokens=1000, **{**numbers, **changed})


@pytest.mark.parametrize(
    ("batch", "decode_ms"),
    [
        (1, 10.6),
        (2, 10.6 + 0.4 / 3),
        (4, 11.0),
        (66, 11.0 + 14.8 * 62 / 124),
        (256, 37.2),
        (512, 37.2 + 11.4 * 256 / 128),  # the last slope goes on
    ],
)
def test_a_step_is_interpolated_and_goes_on_by_the_last_slope(batch: int, decode_ms: float) -> None:
    assert costs().step_s(batch) == pytest.approx(decode_ms * 1e-3 + 0.02, rel=1e-12)


def test_what_is_asked_before_the_first_point_has_its_value() -> None:
    points = Points((4.0, 8.0), (1.0, 2.0))
    assert [points.at(x) for x in (0, 4, 6)] == [1.0, 1.0, 1.5]
    assert Points((4.0,), (1.0,)).at(99) == 1.0


def test_two_equal_xs_make_a_jump() -> None:
    points = Points((0.0, 0.5, 0.5, 1.0), (10.0, 20.0, 100.0, 200.0))
    assert [points.at(x) for x in (0.25, 0.5, 0.75, 1.0)] == [15.0, 20.0, 150.0, 200.0]
    assert points.at(0.5 + 1e-9) == pytest.approx(100.0)
    assert Points((0.0, 1.0, 1.0), (1.0, 2.0, 3.0)).at(2.0) == 3.0  # no slope to go on by


def test_prefill_training_and_nothing_to_do() -> None:
    assert costs().prefill_s(0) == 0.0
    assert costs().prefill_s(200) == pytest.approx(0.01 + 0.02)
    assert costs().train_s(100_000) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("xs", "ys", "word"),
    [
        ((), (), "at least one point"),
        ((1.0,), (1.0, 2.0), "two numbers each"),
        ((2.0, 1.0), (1.0, 2.0), "got 2 and then 1"),
        ((1.0, 2.0), (3.0, 2.0), "got 3 and then 2"),
        ((1.0, 2.0), (-1.0, 2.0), "at least 0"),
        ((1.0, float("nan")), (1.0, 2.0), "finite"),
    ],
)
def test_points_that_are_none_are_named(xs: tuple[float, ...], ys: tuple[float, ...], word: str) -> None:
    assert word in wrong_with(xs, ys)
    assert wrong_with(H800_32B.xs, H800_32B.ys) == ""
