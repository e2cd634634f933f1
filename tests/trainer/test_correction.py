"""Corrections and whole losses against values worked out by hand, and against the formulas written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from plain_formulas import PlainSequence, plain_loss  # noqa: E402

from laminar_hpc.config import schema  # noqa: E402
from laminar_hpc.trainer.api import MiniBatchTotals, Sequence  # noqa: E402
from laminar_hpc.trainer.batch import pad  # noqa: E402
from laminar_hpc.trainer.correction import CORRECTIONS  # noqa: E402
from laminar_hpc.trainer.loss import (  # noqa: E402
    MAXIMA,
    SUMMED,
    TokenBatch,
    correlation,
    mini_batch_metrics,
    policy_loss,
    token_batch,
)

pytestmark = pytest.mark.engine

NAMES = ("tis_token", "tis_sequence", "icepop", "decoupled")

# the first sequence's tokens have pi_proximal / pi_behaviour 0.5 and 3, the second one's 4, 1 and 2
RATIOS = torch.log(torch.tensor([0.5, 3.0, 4.0, 1.0, 2.0]))
SEQUENCE = torch.tensor([0, 0, 1, 1, 1])


def weigh(name: str, difference: Any, sequence: Any, **keys: float) -> Any:
    correction = CORRECTIONS[name]
    assert correction is not None
    return correction(difference, sequence, schema.Trainer(correction=name, **keys))


def test_each_name_of_the_config_has_a_correction() -> None:
    assert set(schema.Trainer.model_fields["correction"].annotation.__args__) == CORRECTIONS.keys()


def test_truncated_tokens_by_hand() -> None:
    found = weigh("tis_token", RATIOS, SEQUENCE, correction_cap=2.5)
    assert found.weights.tolist() == pytest.approx([0.5, 2.5, 2.5, 1.0, 2.0])
    assert found.truncated.tolist() == [False, True, True, False, False]
    assert not found.masked.any()


def test_truncated_sequences_by_hand() -> None:
    # products 0.5 * 3 = 1.5 and 4 * 1 * 2 = 8, cut at 2.5
    found = weigh("tis_sequence", RATIOS, SEQUENCE, correction_cap=2.5)
    assert found.weights.tolist() == pytest.approx([1.5, 1.5, 2.5, 2.5, 2.5])
    assert found.truncated.tolist() == [False, False, True, True, True]


def test_a_product_that_no_float_holds_is_cut_at_the_cap() -> None:
    # e^800 overflows float64, e^-800 is 0 in it
    found = weigh("tis_sequence", torch.tensor([400.0, 400.0, -400.0, -400.0]), torch.tensor([0, 0, 1, 1]))
    assert found.weights.tolist() == [2.0, 2.0, 0.0, 0.0]


def test_masked_tokens_by_hand() -> None:
    found = weigh("icepop", RATIOS, SEQUENCE, correction_low=0.6, correction_high=3.5)
    assert found.weights.tolist() == pytest.approx([0.0, 3.0, 0.0, 1.0, 2.0])
    assert found.masked.tolist() == [True, False, True, False, False]
    assert not found.truncated.any()


@pytest.mark.parametrize(("low", "high"), [(1.0, 5.0), (0.5, 1.0)])
def test_both_edges_of_the_mask_are_kept(low: float, high: float) -> None:
    # exp(0) is 1 exactly, so a ratio lies on the edge itself; the next number below or above 1 does not
    aside = 1e-6 if high == 1.0 else -1e-6
    found = weigh("icepop", torch.tensor([0.0, aside]), torch.tensor([0, 0]), correction_low=low, correction_high=high)
    assert found.weights.tolist() == [1.0, 0.0]
    assert found.masked.tolist() == [False, True]


def test_the_plain_ratio_by_hand() -> None:
    found = weigh("decoupled", RATIOS, SEQUENCE)
    assert found.weights.tolist() == pytest.approx([0.5, 3.0, 4.0, 1.0, 2.0])
    assert not (found.masked | found.truncated).any()


def hand_batch(**changes: Any) -> TokenBatch:
    """Two sequences of two and one tokens.

    pi / pi_proximal: 1.5, 1, 0.5; pi_proximal / pi_behaviour: 3, 0.4, 1; advantages 1, 1, -1. Averaged over sequences a
    token weighs 1/4, 1/4, 1/2.
    """
    behaviour = torch.tensor([-2.0, -1.0, -3.0])
    proximal = behaviour + torch.log(torch.tensor([3.0, 0.4, 1.0]))
    fields: dict[str, Any] = {
        "logprobs": (proximal + torch.log(torch.tensor([1.5, 1.0, 0.5]))).requires_grad_(),
        "entropy": torch.tensor([1.0, 2.0, 4.5]),
        "behaviour": behaviour,
        "advantages": torch.tensor([1.0, 1.0, -1.0]),
        "sequence": torch.tensor([0, 0, 1]),
        "weights": torch.tensor([0.25, 0.25, 0.5]),
        "same_version": torch.zeros(3, dtype=torch.bool),
        "proximal": proximal,
    }
    return TokenBatch(**fields | changes)


# clipped terms with clip 0.2 at the ratios to the proximal policy: -min(1.5, 1.2) = -1.2, -1, -min(-0.5, -0.8) = 0.8
@pytest.mark.parametrize(
    ("name", "loss", "slopes"),
    [
        # ratios to the behaviour policy 4.5, 0.4, 0.5: terms -1.2, -min(0.4, 0.8) = -0.4, 0.8; the middle one is free:
        # (-1.2 - 0.4) / 4 + 0.8 / 2 = 0, slope -0.4 / 4
        ("none", 0.0, [0.0, -0.1, 0.0]),
        # weights min(3, 2), 0.4, 1: -2.4 / 4 - 0.4 / 4 + 0.8 / 2
        ("tis_token", -0.3, [0.0, -0.1, 0.0]),
        # weights 3 * 0.4 = 1.2 twice, 1: 1.2 * (-1.2 - 1) / 4 + 0.8 / 2; slope -1.2 / 4
        ("tis_sequence", -0.26, [0.0, -0.3, 0.0]),
        # weights 3, 0 (0.4 is under 0.5), 1: -3.6 / 4 + 0.8 / 2
        ("icepop", -0.5, [0.0, 0.0, 0.0]),
        # weights 3, 0.4, 1: -3.6 / 4 - 0.4 / 4 + 0.8 / 2
        ("decoupled", -0.6, [0.0, -0.1, 0.0]),
    ],
)
def test_losses_and_slopes_by_hand(name: str, loss: float, slopes: list[float]) -> None:
    batch = hand_batch()
    config = schema.Trainer(correction=name, loss="grpo", aggregation="sequence_mean")
    found, sums, _ = policy_loss(config, batch)
    assert float(found.detach()) == pytest.approx(loss, abs=1e-6)
    assert float(sums[0]) == pytest.approx(loss, abs=1e-6)
    found.backward()
    assert batch.logprobs.grad.tolist() == pytest.approx(slopes, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "masked", "truncated", "mean"),
    [
        ("tis_token", 0.0, 1 / 3, (2 + 0.4 + 1) / 3),
        ("tis_sequence", 0.0, 0.0, (1.2 + 1.2 + 1) / 3),
        ("icepop", 1 / 3, 0.0, (3 + 0 + 1) / 3),
        ("decoupled", 0.0, 0.0, (3 + 0.4 + 1) / 3),
    ],
)
def test_metrics_of_a_correction_by_hand(name: str, masked: float, truncated: float, mean: float) -> None:
    _, sums, maxima = policy_loss(schema.Trainer(correction=name), hand_batch())
    metrics = mini_batch_metrics(sums, maxima, MiniBatchTotals(2, 3))
    assert metrics["masked_fraction"] == pytest.approx(masked)
    assert metrics["truncated_fraction"] == pytest.approx(truncated)
    assert metrics["importance_mean"] == pytest.approx(mean)
    # ratios to the proximal policy 1.5 with A = 1 and 0.5 with A = -1: each bound cuts one of three off
    assert metrics["clip_fraction_high"] == pytest.approx(1 / 3)
    assert metrics["clip_fraction_low"] == pytest.approx(1 / 3)
    assert metrics["ratio_max"] == pytest.approx(1.5, abs=1e-5)
    assert metrics["entropy"] == pytest.approx(2.5)


def test_metrics_without_correction_reference_or_tokens_of_this_version_are_left_out() -> None:
    _, sums, maxima = policy_loss(schema.Trainer(), hand_batch())
    metrics = mini_batch_metrics(sums, maxima, MiniBatchTotals(2, 3))
    usual = {"loss", "entropy", "clip_fraction_low", "clip_fraction_high", "kl_behaviour", "ratio_max"}
    assert metrics.keys() == usual
    # ratios pi / pi_behaviour 4.5, 0.4, 0.5: r - 1 - ln r
    kl = sum(ratio - 1 - math.log(ratio) for ratio in (4.5, 0.4, 0.5)) / 3
    assert metrics["kl_behaviour"] == pytest.approx(kl, abs=1e-6)
    assert metrics["ratio_max"] == pytest.approx(4.5, abs=1e-5)
    nothing = mini_batch_metrics(torch.zeros(len(SUMMED)), torch.zeros(len(MAXIMA)), MiniBatchTotals(0, 0))
    assert nothing == dict.fromkeys(usual, 0.0)


def test_without_a_scored_start_the_current_policy_is_the_proximal_one() -> None:
    batch = hand_batch(proximal=None)
    loss, sums, maxima = policy_loss(schema.Trainer(correction="decoupled"), batch)
    # weights pi / pi_behaviour 4.5, 0.4, 0.5, ratios 1: -4.5 / 4 - 0.4 / 4 + 0.5 / 2
    assert float(loss.detach()) == pytest.approx(-0.975, abs=1e-6)
    loss.backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-1.125, -0.1, 0.25], abs=1e-6)
    assert mini_batch_metrics(sums, maxima, MiniBatchTotals(2, 3))["ratio_max"] == 1.0


def test_the_reference_pulls_with_its_coefficient() -> None:
    # pi_ref / pi = 2 for all: KL estimates 2 - 1 - ln 2 = 0.306853, slopes 1 - 2 = -1; weights 1/4, 1/4, 1/2
    still = hand_batch(advantages=torch.zeros(3))
    batch = msgspec.structs.replace(still, reference=still.logprobs.detach() + math.log(2))
    loss, sums, maxima = policy_loss(schema.Trainer(kl_coefficient=0.1), batch)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.0306853, abs=1e-6)
    assert batch.logprobs.grad.tolist() == pytest.approx([-0.025, -0.025, -0.05], abs=1e-6)
    assert mini_batch_metrics(sums, maxima, MiniBatchTotals(2, 3))["kl_reference"] == pytest.approx(0.306853, abs=1e-6)


LENGTHS = (1, 6, 3, 12)


def random_sequences(scored: bool = True) -> list[Sequence]:
    """Sequences of trained tokens behind a prompt of two; ratios between e^-1.2 and e^1.2."""
    rng = np.random.default_rng(5)
    sequences = []
    for length, advantage in zip(LENGTHS, (1.0, -1.0, -0.5, 2.0), strict=True):
        mask = np.arange(length + 2) >= 2
        proximal, behaviour, reference = (
            np.where(mask, rng.uniform(-2.6, -1.4, length + 2), 0.0).astype(np.float32) for _ in range(3)
        )
        sequences.append(
            Sequence(
                tokens=np.ones(length + 2, np.int64),
                behaviour_logprobs=behaviour,
                loss_mask=mask,
                advantage=advantage,
                proximal_logprobs=proximal if scored else None,
                reference_logprobs=reference if scored else None,
            )
        )
    return sequences


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("dual_clip", [0.0, 1.1])
@pytest.mark.parametrize("name", ["none", *NAMES])
def test_losses_and_slopes_are_those_of_the_formulas_written_out(name: str, dual_clip: float, aggregation: str) -> None:
    config = schema.Trainer(
        correction=name,
        correction_cap=1.3,
        correction_high=2.0,
        dual_clip=dual_clip,
        aggregation=aggregation,
        kl_coefficient=0.3,
    )
    sequences = random_sequences()
    totals = MiniBatchTotals(len(LENGTHS), sum(LENGTHS))
    now = np.random.default_rng(6).uniform(-2.6, -1.4, totals.tokens)
    logprobs = torch.tensor(now, dtype=torch.float32, requires_grad=True)
    batch = token_batch(config, pad(sequences), totals, logprobs, torch.zeros(totals.tokens))
    loss, _, _ = policy_loss(config, batch)
    loss.backward()

    scalars = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in now]
    rest = list(scalars)
    plain = []
    for sequence in sequences:
        count = int(sequence.loss_mask.sum())
        plain.append(
            PlainSequence(
                logprobs=rest[:count],
                behaviour=sequence.behaviour_logprobs[2:].tolist(),
                proximal=sequence.proximal_logprobs[2:].tolist(),
                advantage=sequence.advantage,
                reference=sequence.reference_logprobs[2:].tolist(),
            )
        )
        rest = rest[count:]
    expected = plain_loss(plain, config)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    assert logprobs.grad.tolist() == pytest.approx([float(one.grad) for one in scalars], abs=1e-6)


def test_a_cut_between_sequences_changes_neither_loss_nor_metrics() -> None:
    sequences = random_sequences()
    totals = MiniBatchTotals(len(LENGTHS), sum(LENGTHS))
    now = torch.from_numpy(np.random.default_rng(6).uniform(-2.6, -1.4, totals.tokens)).float()
    sequences = [msgspec.structs.replace(s, version=place % 2) for place, s in enumerate(sequences)]
    config = schema.Trainer(correction="tis_sequence", kl_coefficient=0.3)

    def measured(cuts: list[tuple[int, int]]) -> dict[str, float]:
        sums, maxima = torch.zeros(len(SUMMED), dtype=torch.float64), torch.zeros(len(MAXIMA), dtype=torch.float64)
        for low, high in cuts:
            tokens = slice(sum(LENGTHS[:low]), sum(LENGTHS[:high]))
            part = pad(sequences[low:high], version=1)
            batch = token_batch(config, part, totals, now[tokens], torch.ones(len(now[tokens])))
            _, some, largest = policy_loss(config, batch)
            sums, maxima = sums + some, torch.maximum(maxima, largest)
        return mini_batch_metrics(sums, maxima, totals)

    whole, cut = measured([(0, 4)]), measured([(0, 1), (1, 3), (3, 4)])
    assert whole.keys() == cut.keys()
    assert whole == pytest.approx(cut, rel=1e-6, abs=1e-7)
    assert whole["mismatch_tokens"] == 6 + 12  # the sequences of version 1


def test_mismatch_is_numpys() -> None:
    rng = np.random.default_rng(11)
    recorded = rng.uniform(-6.0, -0.1, 500).astype(np.float32)
    now = (recorded + rng.normal(0.0, 0.05, 500)).astype(np.float32)
    same = rng.random(500) < 0.6
    zeros = torch.zeros(500)
    batch = TokenBatch(
        logprobs=torch.from_numpy(now),
        entropy=zeros,
        behaviour=torch.from_numpy(recorded),
        advantages=zeros,
        sequence=zeros.long(),
        weights=zeros,
        same_version=torch.from_numpy(same),
    )
    _, sums, maxima = policy_loss(schema.Trainer(), batch)
    metrics = mini_batch_metrics(sums, maxima, MiniBatchTotals(1, 500))
    x, y = recorded[same].astype(np.float64), now[same].astype(np.float64)
    assert metrics["mismatch_tokens"] == same.sum()
    assert metrics["mismatch_mean"] == pytest.approx(np.abs(x - y).mean(), rel=1e-9)
    assert metrics["mismatch_max"] == pytest.approx(np.abs(x - y).max(), rel=1e-9)
    assert metrics["mismatch_kl"] == pytest.approx((np.exp(y - x) - 1 - (y - x)).mean(), rel=1e-9)
    assert metrics["mismatch_correlation"] == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-9)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([1.0, 2.0, 3.0], [2.0, 4.0, 6.0], 1.0),
        ([1.0, 2.0, 3.0], [-1.0, -2.0, -3.0], -1.0),
        ([1.0, 2.0, 3.0], [5.0, 4.0, 6.0], 0.5),  # covariance 1/3, variances 2/3 each
        ([1.0, 2.0, 3.0], [0.1, 0.1, 0.1], math.nan),
        ([0.7], [0.1], math.nan),
    ],
)
def test_correlation_by_hand(x: list[float], y: list[float], expected: float) -> None:
    a, b = np.array(x), np.array(y)
    found = correlation(len(x), a.sum(), b.sum(), (a * a).sum(), (b * b).sum(), (a * b).sum())
    assert found == pytest.approx(expected, nan_ok=True)


def test_a_metric_that_is_no_number_is_left_out() -> None:
    batch = hand_batch(behaviour=torch.tensor([-2.0, -1.0, math.nan]))
    _, sums, maxima = policy_loss(schema.Trainer(), batch)
    metrics = mini_batch_metrics(sums, maxima, MiniBatchTotals(2, 3))
    assert "loss" not in metrics
    assert not any(math.isnan(value) for value in metrics.values())


FAR = [-3e4, -89.0, 89.0, 3e4]
"""Log-ratios, the middle ones just beyond those whose exponential a float32 can hold."""


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_log_ratios_of_any_size_give_a_finite_loss_and_gradient(name: str, advantage: float) -> None:
    now = torch.full((len(FAR),), -1.0, requires_grad=True)
    far = torch.tensor(FAR)
    one = torch.ones(len(FAR))
    batch = TokenBatch(
        logprobs=now,
        entropy=one,
        behaviour=now.detach() - far,
        advantages=advantage * one,
        sequence=torch.arange(len(FAR)),
        weights=one / len(FAR),
        same_version=one.bool(),
        proximal=now.detach() + far.flip(0),  # ratios to it, too, are as far
        reference=now.detach() + far,
    )
    loss, sums, maxima = policy_loss(schema.Trainer(correction=name, kl_coefficient=0.1), batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(now.grad).all()
    assert torch.isfinite(sums).all()
    assert torch.isfinite(maxima).all()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_what_is_no_number_has_no_finite_gradient_so_that_the_step_is_skipped(name: str) -> None:
    batch = hand_batch(behaviour=torch.tensor([-2.0, math.nan, -1.0]))
    policy_loss(schema.Trainer(correction=name), batch)[0].backward()
    assert not torch.isfinite(batch.logprobs.grad).all()


def test_a_micro_batch_without_tokens_has_a_loss_of_nothing() -> None:
    none = torch.zeros(0)
    for name in CORRECTIONS:
        batch = TokenBatch(none.clone().requires_grad_(), none, none, none, none.long(), none, none.bool())
        loss, sums, maxima = policy_loss(schema.Trainer(correction=name), batch)
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert not sums.any()
        assert not maxima.any()
