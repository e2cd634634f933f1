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

math-verify takes the inside of a box for one expression, in which a word is a product of its letters. So an answer that is
a single value among words ("the answer is **18** dollars.") also counts as that value, but only where all of the words
are known to leave it alone or look like a unit: "17 or 18", "not 18", "18 dozen" and "18x" are not 18.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from decimal import Decimal
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from laminar_hpc.errors import ConfigError
from laminar_hpc.tasks.answers import CLOSE_TAG, NUMBER, OPEN_TAG, final_answer, parse_number

LONGEST_ANSWER = 1000

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_FORMS = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

_AROUND = re.compile(r"(\*{1,3}|_{1,2}|`|\${1,2})(?=[^\s*_`$])((?:(?!\1).)*[^\s*_`$])\1", re.DOTALL)
_SCIENTIFIC = re.compile(r"(?<![\w.,\\])([0-9]+(?:\.[0-9]+)?[eE][-+]?[0-9]{1,3})(?!\w|\.[0-9])")

_LEAD = (
    *("answer", "are", "be", "equals", "final", "get", "got", "have", "hence", "i get", "i got", "i have", "is", "it"),
    *("my", "our", "result", "so", "solution", "the", "then", "there", "therefore", "thus", "total", "value", "we"),
)
_SHORT_UNITS = ("cm", "ft", "hr", "hrs", "in", "kg", "km", "lb", "lbs", "mg", "mi", "ml", "mm", "mph", "of", "oz")
_NO_UNITS = (  # words that change a value, or bring another one
    *("and", "but", "choose", "cubed", "divided", "either", "factorial", "incorrect", "instead", "less", "maybe"),
    *("minus", "mod", "modulo", "more", "multiplied", "nor", "not", "over", "percent", "percentage", "perhaps", "plus"),
    *("point", "squared", "than", "times", "wrong", "half", "halves", "thirds?", "quarters?"),
    r"(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|hundred|thousand|million)ths?",
    *("dozens?", "score", "hundreds?", "thousands?", "millions?", "[bt]rillions?", "billions?", "zero", "one", "two"),
    *("three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "[a-z]+teen", "twenty"),
    *("thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "infinity", "alpha", "beta", "gamma"),
    *("delta", "theta", "lambda", "phi", "omega", "sin", "cos", "tan", "cot", "log", "exp", "root"),
)
_WORD = rf"(?!(?:{'|'.join(_NO_UNITS)})\b)(?=[a-z]*[aeiou])[a-z]{{3,}}"
_UNIT = rf"(?:{_WORD}|(?:{'|'.join(_SHORT_UNITS)})(?:\^?[23]|[\u00b2\u00b3])?)(?![\w^])"
_STATED = re.compile(
    rf"(?:(?:{'|'.join(_LEAD)})\b[\s,:]*){{0,8}}"  # so the final answer is:
    r"(?:[a-z]?\s*=\s*)?"  # x =
    r"(?P<mark>[*_`]{0,3})(?:\\?[$\u20ac\u00a3])?"  # **$
    rf"(?P<value>\$[^$]+\$|\\\([^$]+?\\\)|[-+\u2212]?{NUMBER}(?:/{NUMBER})?)(?P=mark)"
    rf"(?:\s+{_UNIT}(?:/{_UNIT})?){{0,4}}",  # dollars per day
    re.IGNORECASE | re.DOTALL,
)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its bounds are off


def is_right(response: str, expected: str, tags_required: bool) -> bool:
    """Whether the answer of `response` is mathematically the same as `expected`. May take for ever, and may raise anything."""
    answer = extract_answer(response, tags_required)
    if answer is None:
        return False
    gold = _parse_expected(expected)
    if not answer:
        return _is_same(gold, expected, _parse_text(_without_exponents(response[-LONGEST_ANSWER:])))
    value = stated_value(answer)  # first, as it costs least
    readings = dict.fromkeys([*([] if value is None else [value]), *_readings(answer)])
    return any(_is_same(gold, expected, _parse(reading)) for reading in readings)


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


def stated_value(answer: str) -> str | None:
    """The value that an answer of words and one value states: "18" of "The answer is **18** dollars."; None: it is no such."""
    match = _STATED.fullmatch(_plain(answer))
    return _without_exponents(match["value"]) if match else None


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
    return [form for reading in _readings(expected) for form in _parse(reading)]


def _readings(answer: str) -> list[str]:
    """What an answer as a whole may mean: 2e-3 is 0.002, but where e is Euler's number it is a difference."""
    plain = _plain(answer)
    return list(dict.fromkeys((_without_exponents(plain), plain)))


def _plain(answer: str) -> str:
    """The answer without white space, emphasis and dollars around it, and without a full stop behind it."""
    while True:
        inside = answer.strip()
        if inside.endswith(".") and not inside.endswith(".."):
            inside = inside[:-1]
        if around := _AROUND.fullmatch(inside):
            inside = around[2]
        if inside == answer:
            return inside
        answer = inside


def _without_exponents(text: str) -> str:
    """`text` with 1.5e3 written as 1500, since math-verify takes any e for Euler's number."""
    return _SCIENTIFIC.sub(lambda match: format(Decimal(match[1]), "f"), text)


def _is_same(gold: list[Any], expected: str, found: list[Any]) -> bool:
    """As math-verify compares, which rounds floating-point numbers to six decimals; here to three digits at least."""
    number = parse_number(_plain(expected).strip("$"))
    zeros = len(str(math.ceil(1 / abs(number)) - 1)) - 1 if number else 0  # behind the decimal point
    return bool(verify(gold, found, float_rounding=max(6, zeros + 3), timeout_seconds=None, raise_on_error=True))


def _parse(answer: str) -> list[Any]:
    """All of `answer` as one expression, which is how math-verify takes the inside of a box."""
    inside = answer.strip().strip("$").strip()
    return _parse_text(f"\\boxed{{{inside}}}")


def _parse_text(text: str) -> list[Any]:
    found: list[Any] = parse(text, extraction_config=_FORMS, parsing_timeout=None, raise_on_error=True)
    return found
