"""The verifier "math": answers compared as mathematical expressions, by math-verify.

math-verify bounds its own time with an alarm, which fails outside the main thread, and then scores 0. Here its bounds
are off, and so is its habit to take an error for a wrong answer: the process in which a response is graded is killed at
the deadline, and an error in the comparison is reported as one.

Which part of a response is its answer:

1. Where the template asks for <answer></answer>, the inside of the last pair, and nothing else.
2. Else the last \\boxed{...} whose braces are balanced: that is how models are taught to end a solution.
3. Else the inside of the last <answer></answer> pair.
4. Else what math-verify finds last in the last 1,000 characters: LaTeX between dollars, an expression, a number.

A \\boxed{...} inside the tags is taken out of them. What cannot be read as mathematics is compared as text; what is longer than
1,000 characters is no answer.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from laminar_hpc.errors import ConfigError
from laminar_hpc.tasks.answers import CLOSE_TAG, OPEN_TAG, final_answer

LONGEST_ANSWER = 1000

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_FORMS = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its bounds are off


def is_right(response: str, expected: str, tags_required: bool) -> bool:
    """Whether the answer of `response` is mathematically the same as `expected`. May take for ever, and may raise anything."""
    answer = extract_answer(response, tags_required)
    if answer is None:
        return False
    gold = _parse_expected(expected)
    found = _parse(answer) if answer else _parse_text(response[-LONGEST_ANSWER:])
    return bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))


def extract_answer(response: str, tags_required: bool) -> str | None:
    """The answer in the order above; "" where there is neither box nor tags, None where there is no answer."""
    answer: str | None
    if tags_required:
        inside = final_answer(response, tags_required=True)
        answer = None if inside is None else last_boxed(inside) or inside
    else:
        answer = last_boxed(response)
        if answer is None and OPEN_TAG in response and CLOSE_TAG in response:
            answer = final_answer(response, tags_required=True)
        if answer is None:
            return ""
    return answer if answer and len(answer) <= LONGEST_ANSWER else None


def last_boxed(text: str) -> str | None:
    """The inside of the last \\boxed{...} with balanced braces, stripped; escaped braces do not count. None: there is none."""
    found: tuple[int, int] | None = None
    opened: list[int | None] = []  # for each open brace, where the inside of its box begins; None for one of no box
    for match in _BRACES.finditer(text):
        if match[0] == "}":
            start = opened.pop() if opened else None
            if start is not None and (found is None or start > found[0]):
                found = start, match.start()
        elif match[0][-1] == "{" and match[0] != "\\{":
            opened.append(None if match[0] == "{" else match.end())
    return text[slice(*found)].strip() if found else None


def check_math_verify() -> None:
    """Grade two answers, which also builds the parser's tables; ConfigError where the outcome is not what it must be."""
    try:
        outcome = (is_right(r"\boxed{\frac{1}{2}}", "0.5", False), is_right("so 2^3 + 1", "8", False))
    except Exception as error:  # a library that does not fit to its own dependencies may raise anything
        raise ConfigError(f"task.verifier = 'math': math-verify does not work here: {error!r}") from error
    if outcome != (True, False):
        raise ConfigError("task.verifier = 'math': math-verify does not work here: it finds that 1/2 is not 0.5")


@functools.lru_cache(maxsize=4096)
def _parse_expected(expected: str) -> list[Any]:
    return _parse(expected)


def _parse(answer: str) -> list[Any]:
    """All of `answer` as one expression, which is how math-verify takes the inside of a box."""
    inside = answer.strip().strip("$").strip()
    return _parse_text(f"\\boxed{{{inside}}}")


def _parse_text(text: str) -> list[Any]:
    found: list[Any] = parse(text, extraction_config=_FORMS, parsing_timeout=None, raise_on_error=True)
    return found
