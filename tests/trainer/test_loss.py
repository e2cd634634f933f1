"""The loss on tokens against values worked out by hand, and the KL estimate against the sum over the vocabulary."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from laminar_hpc.trainer.api import MiniBatchTotals  # noqa: E402
from laminar_hpc.trainer.loss import (  # noqa: E402
    behaviour_kl,
    clipped_terms,
    token_entropy,
    token_metrics,
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


def test_metrics_by_hand() -> None:
    # ratios 0.5, 1, 1.5 with advantages 1, -1, 2: only the last is cut off, above
    sums, ratio_max = token_metrics(NOW, BEHAVIOUR, ADVANTAGES, torch.tensor([1.0, 2.0, 3.0]), 0.2, 0.28)
    kl = (0.5 - 1 + 0.69315) + 0.0 + (1.5 - 1 - 0.40547)
    assert sums.tolist() == pytest.approx([6.0, 0.0, 1.0, kl], abs=1e-4)
    assert float(ratio_max) == pytest.approx(1.5, abs=1e-4)
    # with the signs turned the first one is cut off, below
    sums, _ = token_metrics(NOW, BEHAVIOUR, -ADVANTAGES, torch.zeros(3), 0.2, 0.28)
    assert sums[1:3].tolist() == [1.0, 0.0]


def test_kl_estimate_is_unbiased() -> None:
    behaviour = torch.log_softmax(torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64), dim=0)
    current = torch.log_softmax(torch.tensor([1.0, 0.2, -0.4, 0.1], dtype=torch.float64), dim=0)
    expected = float((behaviour.exp() * (behaviour - current)).sum())  # KL(behaviour || current), the definition
    reverse = float((current.exp() * (current - behaviour)).sum())
    estimate = float((behaviour.exp() * behaviour_kl(current, behaviour)).sum())  # expectation over behaviour's samples
    assert estimate == pytest.approx(expected, abs=1e-12)
    assert abs(expected - reverse) > 0.05  # so the direction is told apart
    assert (behaviour_kl(current, behaviour) >= 0).all()
