"""GRPO's advantages: how much better a response is than the others to the same prompt."""

from __future__ import annotations

import numpy as np

EPSILON = 1e-6


def group_advantages(groups: list[int], rewards: list[float]) -> list[float]:
    """One advantage a response: (reward - group mean) / (group standard deviation + 1e-6).

    `groups` names the group of each entry of `rewards`; the standard deviation is the sample's (ddof 1). Where all
    rewards of a group are equal, and in a group of one, the advantage is 0. Source: Shao et al. 2024 (GRPO,
    arXiv 2402.03300), section 4.1.2.
    """
    if len(groups) != len(rewards):
        raise ValueError(f"one group for each reward, got {len(groups)} groups and {len(rewards)} rewards")
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        for index, value in zip(indices, _standardised([rewards[i] for i in indices]), strict=True):
            advantages[index] = value
    return advantages


def _standardised(rewards: list[float]) -> list[float]:
    values = np.asarray(rewards, dtype=np.float64)
    if values.size < 2 or values.min() == values.max():  # rounding in the mean must not blow up to an advantage
        return [0.0] * len(rewards)
    scaled = (values - values.mean()) / (values.std(ddof=1) + EPSILON)
    return [float(value) for value in scaled]
