"""From a response to its answer, and the built-in verifiers: text and exact arithmetic, nothing is evaluated."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction

OPEN_TAG, CLOSE_TAG = "<answer>", "</answer>"

_LONGEST_NUMBER = 1000
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?"
"""The pattern of a number without its sign: 12, 1,234.5, .5, 1e-3."""

_SIGN = r"(?:(?<![\w)\]])[-+\u2212])?"  # after a word or a bracket it is an operator
_NUMBERS = re.compile(rf"(?P<sign>{_SIGN})(?P<numerator>{NUMBER})(?:/(?P<denominator>{NUMBER}))?")

Verifier = Callable[[str, str, bool], bool]
"""Of a response, the expected answer, and whether only an answer between tags counts: whether the response is right."""


def final_answer(response: str, tags_required: bool = False) -> str | None:
    """The answer that a response ends on, stripped: the inside of its last <answer></answer> pair, else all of it.

    None where tags are required and there is no whole pair.
    """
    end = response.rfind(CLOSE_TAG)
    start = response.rfind(OPEN_TAG, 0, max(end, 0))
    if start >= 0:
        return response[start + len(OPEN_TAG) : end].strip()
    return None if tags_required else response.strip()


def as_response(answer: str, tags_required: bool) -> str:
    """The shortest response whose final answer is `answer`."""
    return f"{OPEN_TAG}{answer}{CLOSE_TAG}" if tags_required else answer


def parse_number(text: str) -> Fraction | None:
    """The number that `text` is: 12, -1,234.5, .5, 1e-3 or 3/4; None where it is none, or longer than 1,000 characters."""
    match = _NUMBERS.fullmatch(text.strip())
    return _value(match) if match else None


def last_number(text: str) -> Fraction | None:
    """The last number in `text`, in the forms that `parse_number` takes."""
    found = deque(_NUMBERS.finditer(text), maxlen=1)
    return _value(found[0]) if found else None


def same_text(answer: str, expected: str) -> bool:
    """Whether both are the same but for white space at the ends and the length of white space inside."""
    return answer.split() == expected.split()


def same_number(answer: str, expected: str) -> bool:
    """Whether the last number in `answer` is exactly the number `expected`."""
    number = last_number(answer)
    return number is not None and number == parse_number(expected)


def has_same_text(response: str, expected: str, tags_required: bool) -> bool:
    """The verifier "exact": whether the final answer is `expected`, as `same_text` compares."""
    answer = final_answer(response, tags_required)
    return answer is not None and same_text(answer, expected)


def has_same_number(response: str, expected: str, tags_required: bool) -> bool:
    """The verifier "number": whether the last number of the final answer is `expected`."""
    answer = final_answer(response, tags_required)
    return answer is not None and same_number(answer, expected)


VERIFIERS: dict[str, Verifier] = {"exact": has_same_text, "number": has_same_number}


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _LONGEST_NUMBER:  # int() refuses very long ones: a wrong answer would look like a failure
        return None
    value = Fraction(match["numerator"].replace(",", ""))
    if match["denominator"] is not None:
        denominator = Fraction(match["denominator"].replace(",", ""))
        if denominator == 0:
            return None
        value /= denominator
    return -value if match["sign"] in ("-", "\u2212") else value
