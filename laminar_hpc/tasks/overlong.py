"""DAPO's soft punishment of responses that are nearly, or entirely, too long."""

from __future__ import annotations


def overlong_penalty(tokens: int, max_tokens: int, interval_tokens: int) -> float:
    """What is added to the reward of a response of `tokens` tokens, its end token counted: between -1 and 0.

    arXiv 2503.14476, equation 13, with y the response, L_max = `max_tokens` and L_cache = `interval_tokens`:

        0                                   where |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|) / L_cache where L_max - L_cache < |y| <= L_max
        -1                                  where L_max < |y|

    `interval_tokens` = 0 switches it off.
    """
    if not interval_tokens:
        return 0.0
    excess_tokens = tokens - (max_tokens - interval_tokens)
    return -min(1.0, max(0, excess_tokens) / interval_tokens)
