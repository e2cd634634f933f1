"""The norm of very many gradients."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from laminar_hpc.trainer.flat import FlatParameters  # noqa: E402

pytestmark = pytest.mark.engine


def test_the_norm_of_many_equal_gradients_is_that_of_the_formula() -> None:
    count = (1 << 23) + 5  # torch's own norm of them is off by 0.7 %
    flat = FlatParameters(torch.nn.Embedding(count, 1))
    flat.gradients.fill_(0.1)
    assert float(flat.clip(0.0)) == pytest.approx(0.1 * math.sqrt(count), rel=1e-4)
