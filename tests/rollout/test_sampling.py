"""The noise and what it samples, against the published algorithm and against softmax."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from laminar_hpc.rollout.sampling import gumbel_noise, sample, signed, splitmix64  # noqa: E402

pytestmark = pytest.mark.engine

MASK = (1 << 64) - 1

# The first five outputs of SplitMix64 seeded with 1234567, as listed at https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def splitmix64_in_integers(seed: int, counter: int) -> int:
    """Vigna's splitmix64.c (public domain) in Python's unbounded integers."""
    z = (seed + counter * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor([signed(value) for value in values])


def test_splitmix64_gives_the_published_outputs() -> None:
    bits = splitmix64(int64(1234567), torch.arange(1, 6))
    assert [value & MASK for value in bits.tolist()] == PUBLISHED


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_noise_is_the_documented_function_of_seed_position_and_index(seed: int) -> None:
    noise = gumbel_noise(int64(seed), torch.tensor([17]), 5)[0].tolist()
    stream = splitmix64_in_integers(seed, 17)
    for index, value in enumerate(noise):
        bits = splitmix64_in_integers(stream, index + 1) >> 24
        expected = -math.log(-math.log1p(-(bits + 0.5) / 2**40))
        assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_noise_of_a_row_does_not_depend_on_the_other_rows() -> None:
    seeds, positions = int64(5, 2**63 + 9, 7), torch.tensor([1, 400, 3])
    together = gumbel_noise(seeds, positions, 50)
    for row in range(3):
        assert torch.equal(together[row : row + 1], gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 50))


def test_noise_has_the_mean_and_variance_of_the_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.arange(2000), torch.full((2000,), 9), 100).double()
    assert noise.isfinite().all()
    # Euler's constant and pi^2 / 6; the mean of 200,000 draws has a standard error of 0.0029, the variance one of 0.0077
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=0.012)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.031)


@pytest.mark.parametrize(("vary", "temperature"), [("seed", 1.0), ("seed", 0.5), ("position", 1.0)])
def test_samples_are_distributed_as_softmax(vary: str, temperature: float) -> None:
    draws = 40_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0, 0.5, -0.5, 1.5])
    numbers = torch.arange(1, draws + 1)
    fixed = torch.full((draws,), 12345)
    seeds, positions = (numbers, fixed) if vary == "seed" else (fixed, numbers)
    tokens, _ = sample(logits.expand(draws, -1), seeds, positions, torch.full((draws,), temperature))
    counts = torch.bincount(tokens, minlength=len(logits)).tolist()
    weights = [math.exp(value / temperature) for value in logits.tolist()]
    expected = [draws * weight / sum(weights) for weight in weights]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))
    assert chi_square < 24.32  # 7 degrees of freedom, p = 0.001


def test_neighbouring_seeds_and_positions_give_independent_samples() -> None:
    sides = 4
    numbers = torch.arange(20_000)
    logits = torch.zeros(len(numbers), sides)
    ones = torch.ones(len(numbers))

    def draw(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return sample(logits, seeds, positions, ones)[0]

    here = draw(numbers, numbers * 0 + 5)
    for other in (draw(numbers + 1, numbers * 0 + 5), draw(numbers, numbers * 0 + 6)):
        pairs = torch.bincount(here * sides + other, minlength=sides * sides).double()
        expected = len(numbers) / sides**2
        assert ((pairs - expected) ** 2 / expected).sum().item() < 37.70  # 15 degrees of freedom, p = 0.001


def test_logprob_is_that_of_the_policy_sampled_from() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]] * 3)
    tokens, logprobs = sample(logits, int64(1, 2, 3), torch.tensor([4, 4, 4]), torch.tensor([1.0, 0.5, 0.0]))
    chance_of_1 = [3 / 4, 9 / 10, 3 / 4]  # softmax at T = 1, at T = 1/2 (weights 1 and 9), and greedy as at T = 1
    for token, logprob, chance in zip(tokens.tolist(), logprobs.tolist(), chance_of_1, strict=True):
        assert logprob == pytest.approx(math.log(chance if token == 1 else 1 - chance), abs=1e-6)
    assert tokens[2] == 1


def test_greedy_rows_take_the_largest_logit_beside_sampled_ones() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    temperatures = torch.tensor([0.0, 1.0]).repeat(25)
    tokens, _ = sample(logits, torch.arange(50), torch.ones(50, dtype=torch.int64), temperatures)
    largest = logits.argmax(-1)
    assert torch.equal(tokens[::2], largest[::2])
    assert not torch.equal(tokens[1::2], largest[1::2])


def test_a_token_with_logit_minus_infinity_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]]).expand(5000, -1)
    tokens, logprobs = sample(logits, torch.arange(5000), torch.full((5000,), 2), torch.ones(5000))
    assert set(tokens.tolist()) == {0, 2}
    assert logprobs.tolist() == pytest.approx([-math.log(2)] * 5000)
