"""Answers out of responses, and the built-in verifiers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.tasks.answers import final_answer, last_number, parse_number, same_number, same_text


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("  42\n", "42"),
        ("so <answer> 42 </answer> it is", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("</answer> 7 <answer>", "</answer> 7 <answer>"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer></answer>", ""),
    ],
)
def test_the_answer_is_the_inside_of_the_last_whole_pair_else_everything(response: str, answer: str) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"), [("42", None), ("<answer>42", None), ("42</answer>", None), ("<answer>42</answer>", "42")]
)
def test_where_tags_are_required_nothing_else_is_an_answer(response: str, answer: str | None) -> None:
    assert final_answer(response, tags_required=True) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 42.", Fraction(42)),
        ("12 + 30 = 42", Fraction(42)),
        ("x=-3", Fraction(-3)),
        ("\u22125 degrees", Fraction(-5)),
        ("8-3", Fraction(3)),
        ("f(2)-3", Fraction(3)),
        ("$1,234,567.50!", Fraction(246913500, 200)),
        ("12,34", Fraction(34)),
        ("1,2345", Fraction(2345)),
        ("3/4", Fraction(3, 4)),
        ("-1.5/.5", Fraction(-3)),
        ("1/0", None),
        (".25", Fraction(1, 4)),
        ("2e-3", Fraction(2, 1000)),
        ("1e9999", Fraction(9999)),
        ("none", None),
        ("", None),
        ("9" * 1000, Fraction(10**1000 - 1)),
        ("9" * 5000, None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: Fraction | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize("text", ["", "x", "1 2", "5.", "1,23", "--1", "1/0", "0x10", "nan", "inf", "1e99999"])
def test_what_is_no_number_as_a_whole(text: str) -> None:
    assert parse_number(text) is None


decimals = st.builds(
    lambda sign, whole, digits: (sign, whole, digits),
    st.sampled_from(["", "-", "+"]),
    st.integers(0, 10**12),
    st.text("0123456789", max_size=6),
)


@given(
    decimals, st.sampled_from(["", "is ", "= ", "17 and "]), st.sampled_from(["", ".", " apples", "\n"]), st.booleans()
)
def test_a_written_decimal_is_read_as_its_value(
    number: tuple[str, int, str], before: str, after: str, commas: bool
) -> None:
    sign, whole, digits = number
    text = f"{sign}{whole:,}" if commas else f"{sign}{whole}"
    text += f".{digits}" if digits else ""
    value = Fraction(whole * 10 ** len(digits) + int(digits or "0"), 10 ** len(digits))
    assert last_number(f"{before}{text}{after}") == (-value if sign == "-" else value)


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**9), st.integers(1, 50))
def test_equal_fractions_are_equal_however_they_are_written(numerator: int, denominator: int, factor: int) -> None:
    written = f"{numerator * factor}/{denominator * factor}"
    assert same_number(f"so it is {written}", f"{numerator}/{denominator}")
    assert not same_number(f"so it is {written}", f"{numerator + 1}/{denominator}")


@given(st.text())
def test_any_text_can_be_graded(text: str) -> None:
    assert same_number(text, "7") == (last_number(text) == 7)
    assert same_text(text, f"  {text}\n")


def test_text_is_compared_but_for_white_space() -> None:
    assert same_text(" a  b\n", "a b")
    assert not same_text("ab", "a b")
    assert not same_text("A b", "a b")
