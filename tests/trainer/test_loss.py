"""The loss on tokens against values worked out by hand, and the KL estimate against the sum over the vocabulary."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from laminar_hpc.trainer.api import MiniBatchTotals  # noqa: E402
from laminar_hpc.trainer.loss import (  # noqa: E402
    clipped_terms,
    dual_clipped,
    kl_estimate,
    token_entropy,
    token_weights,
)

pytestmark = pytest.mark.engine

# ratios exp(-0.69315) = 0.5, 1 and exp(0.40547) = 1.5
NOW = torch.tensor([-1.69315, -1.0, -0.59453])
BEHAVIOUR = torch.tensor([-1.0, -1.0, -1.0])
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0])


@pytest.mark.parametrize(
    ("high", "terms", "mean"),
    [(0.2, [-0.5, 1.0, -2.4], -0.6333), (0.28, [-0.5, 1.0, -2.56], -0.6867)],
)
def test_clipped_terms_by_hand(high: float, terms: list[float], mean: float) -> None:
    found = clipped_terms(NOW, BEHAVIOUR, ADVANTAGES, 0.2, high)
    assert found.tolist() == pytest.approx(terms, abs=1e-4)
    assert float(found.mean()) == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize(("ratio", "term"), [(0.5, 0.8), (1.5, 1.5)])
def test_negative_advantage_by_hand(ratio: float, term: float) -> None:
    found = clipped_terms(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([-1.0]), 0.2, 0.28)
    assert float(found) == pytest.approx(term, abs=1e-6)


def test_clipped_tokens_have_no_gradient() -> None:
    now = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5])).requires_grad_()
    clipped_terms(now, torch.zeros(4), torch.tensor([1.0, -1.0, -1.0, 1.0]), 0.2, 0.28).sum().backward()
    # free tokens: d(-ratio * A)/d(logprob) = -ratio * A
    assert now.grad.tolist() == pytest.approx([0.0, 0.0, 1.5, -0.5])


@pytest.mark.parametrize("far", [89.0, 3e4])  # beyond the exponents that a float32 can hold
def test_clipped_tokens_have_no_gradient_however_far_away_they_are(far: float) -> None:
    now = torch.tensor([far, -far, far, -far, far]).requires_grad_()
    found = clipped_terms(now, torch.zeros(5), torch.tensor([1.0, -1.0, 0.0, 0.0, -1.0]), 0.2, 0.28)
    found.sum().backward()
    # -min(ratio * A, clip(ratio) * A): the upper bound with A = 1, the lower one with A = -1; nothing where A = 0. The ratio
    # of the last one is not clipped by these, but held at e^20
    assert found.tolist() == pytest.approx([-1.28, 0.8, 0.0, 0.0, math.exp(20)])
    assert now.grad.tolist() == [0.0] * 5


def test_the_kl_estimate_is_finite_however_far_away_the_other_policy_is() -> None:
    now = torch.zeros(2).requires_grad_()
    found = kl_estimate(now, torch.tensor([3e4, -3e4]))
    found.sum().backward()
    # held at e^20 - 1 - 20; 0 - 1 + 3e4, whose slope by ln pi is 1 - pi_ref / pi = 1
    assert found.tolist() == pytest.approx([math.exp(20) - 21, 3e4 - 1])
    assert now.grad.tolist() == [0.0, 1.0]


def test_dual_clip_by_hand() -> None:
    # clipped terms to begin with, clip 0.2: A = -1 at ratios 5, 2, 0.5: 5, 2, 0.8; A = 2 at ratio 5: -min(10, 2.4) = -2.4.
    # A bound of 3 holds the first one at -3 * A = 3; A = -2 at ratio 5: 10, held at 6
    now = torch.log(torch.tensor([5.0, 2.0, 0.5, 5.0, 5.0])).requires_grad_()
    advantages = torch.tensor([-1.0, -1.0, -1.0, 2.0, -2.0])
    found = dual_clipped(clipped_terms(now, torch.zeros(5), advantages, 0.2, 0.2), advantages, 3.0)
    assert found.tolist() == pytest.approx([3.0, 2.0, 0.8, -2.4, 6.0], abs=1e-5)
    found.sum().backward()
    # what is held has no gradient; the second one, neither clipped nor held, has -ratio * A
    assert now.grad.tolist() == pytest.approx([0.0, 2.0, 0.0, 0.0, 0.0], abs=1e-5)


def test_kl_estimate_by_hand() -> None:
    # pi_ref / pi = 2: 2 - 1 - ln 2; 1/2: 1/2 - 1 + ln 2; 1: 0. Derivative by ln pi: 1 - pi_ref / pi
    now = torch.zeros(3).requires_grad_()
    found = kl_estimate(now, torch.log(torch.tensor([2.0, 0.5, 1.0])))
    assert found.tolist() == pytest.approx([0.306853, 0.193147, 0.0], abs=1e-6)
    found.sum().backward()
    assert now.grad.tolist() == pytest.approx([-1.0, 0.5, 0.0], abs=1e-6)


def test_token_mean_weighs_tokens_alike() -> None:
    weights = token_weights("token_mean", torch.tensor([1, 3]), MiniBatchTotals(sequences=5, tokens=20))
    assert weights.tolist() == pytest.approx([0.05, 0.05])


def test_sequence_mean_weighs_sequences_alike() -> None:
    weights = token_weights("sequence_mean", torch.tensor([1, 4, 0]), MiniBatchTotals(sequences=5, tokens=20))
    assert weights[:2].tolist() == pytest.approx([0.2, 0.05])
    assert torch.isfinite(weights).all()


def test_unknown_aggregation() -> None:
    with pytest.raises(ValueError, match="token_mean or sequence_mean, got 'mean'"):
        token_weights("mean", torch.tensor([1]), MiniBatchTotals(1, 1))


def test_entropy_by_hand() -> None:
    # a fair coin: ln 2; a certain token: 0
    rows = torch.log_softmax(torch.tensor([[0.0, 0.0], [60.0, 0.0]]), dim=1)
    assert token_entropy(rows).tolist() == pytest.approx([math.log(2), 0.0], abs=1e-6)


def test_kl_estimate_is_unbiased() -> None:
    behaviour = torch.log_softmax(torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64), dim=0)
    current = torch.log_softmax(torch.tensor([1.0, 0.2, -0.4, 0.1], dtype=torch.float64), dim=0)
    expected = float((behaviour.exp() * (behaviour - current)).sum())  # KL(behaviour || current), the definition
    reverse = float((current.exp() * (current - behaviour)).sum())
    estimate = float((behaviour.exp() * kl_estimate(behaviour, current)).sum())  # expectation over behaviour's samples
    assert estimate == pytest.approx(expected, abs=1e-12)
    assert abs(expected - reverse) > 0.05  # so the direction is told apart
    assert (kl_estimate(behaviour, current) >= 0).all()
