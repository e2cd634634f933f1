"""Log-probabilities over a vocabulary with padding, against torch's own log_softmax in float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from laminar_hpc.trainer.vocabulary import token_logprobs  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("padding", [0, 3])
def test_values_and_gradients_are_those_of_log_softmax(padding: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(6, 11 + padding, generator=generator)
    logits[:, 11:] = 40.0  # would take all probability
    tokens = torch.tensor([0, 10, 3, 3, 7, 1])
    weights = torch.randn(6, generator=generator)
    own = logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(own, tokens, 0, 11, None)
    torch.autograd.backward((weights * logprobs).sum())
    other = logits.double().requires_grad_()
    distribution = torch.log_softmax(other[:, :11], dim=1)
    expected = distribution.gather(1, tokens[:, None])[:, 0]
    torch.autograd.backward((weights * expected).sum())
    assert torch.allclose(logprobs.double(), expected, atol=1e-5)
    assert torch.allclose(entropy.double(), -(distribution.exp() * distribution).sum(dim=1), atol=1e-5)
    assert own.grad is not None
    assert torch.allclose(own.grad.double(), other.grad, atol=1e-6)
    assert not entropy.requires_grad
