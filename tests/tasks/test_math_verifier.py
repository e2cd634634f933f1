"""The verifier "math": equivalences worked out by hand, and answers that are made to hurt."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("math_verify")

from laminar_hpc.config.schema import Config
from laminar_hpc.process.channel import wait_any
from laminar_hpc.protocol.trajectory import Purpose, Verdict
from laminar_hpc.tasks import worker as task_worker
from laminar_hpc.tasks.grader import Grader, Outcome
from laminar_hpc.tasks.math_verifier import LONGEST_ANSWER, extract_answer, is_right, last_boxed
from laminar_hpc.tasks.tokenizer import Tokenizer

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("0.5", "1/2"),
        (r"\frac{1}{2}", "0.5"),
        ("1/2", r"\dfrac12"),
        (r"1\frac{1}{2}", "1.5"),
        (r"10\%", "0.1"),
        ("1,234", "1234"),
        (r"\$18", "18"),
        (r"90^\circ", "90"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        ("2^{10}", "1024"),
        ("(x+1)^2", "x^2+2x+1"),
        ("x=5", "5"),
        (r"\{3,2,1\}", r"\{1,2,3\}"),
        ("[0,1)", "[0,1)"),
        ("(1,2)", "(1,2)"),
        (r"\text{Evelyn}", r"\text{Evelyn}"),
        (r"\text{Evelyn}.", r"\text{Evelyn}"),
        ("18.", "18"),
        ("18", "18."),
        ("**18**", "18"),
        ("*18*.", "18"),
        ("`18`", "18"),
        ("$18$.", "18"),
        ("$18.$", "18"),
        ("18 dollars", "18"),
        ("18 eggs.", "18"),
        ("18 months", "18"),
        ("$18 dollars per day", "18"),
        ("1,800 square feet", "1800"),
        ("18 cm^2", "18"),
        ("18 dollars/hour", "18"),
        ("3/4 cups", "0.75"),
        ("The answer is 18", "18"),
        ("So, the final answer is: **18** clips.", "18"),
        (r"It is $\frac{1}{2}$.", "0.5"),
        (r"The answer is \(2\sqrt{3}\)", r"\sqrt{12}"),
        ("x = 18 dollars", "18"),
        ("18 dollars", "18 dollars"),
        ("17 or 18", r"\{17, 18\}"),
        ("0.001", "1e-3"),
        ("1e-3", "0.001"),
        ("1/1000", "1E-3"),
        ("1000", "1e3"),
        ("1.8e1 dollars", "18"),
        ("-1.5e+2", "-150"),
        (r"10^{-7}", "1e-7"),
        ("1e999", "1e999"),
        ("-3+2e", "2e-3"),  # e is Euler's number, too
    ],
)
def test_equal_answers_are_right(answer: str, expected: str) -> None:
    assert is_right(f"So it is \\boxed{{{answer}}}.", expected, tags_required=False)
    assert is_right(f"3 <answer>{answer}</answer>", expected, tags_required=True)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("3", "4"),
        ("-7", "7"),
        ("0.33", "1/3"),
        ("3.14", r"\pi"),
        ("(0,1)", "[0,1)"),
        ("(1,2)", "(2,1)"),
        (r"\{1,2\}", r"\{1,2,3\}"),
        ("3 or 4", "4"),
        ("5 + y", "5"),
        ("18 or 19", "18"),
        ("18 or 19", "19"),
        ("17 or 18 dollars", "18"),
        ("17 and 18", "18"),
        ("$17$ or $18$", "18"),
        ("not 18", "18"),
        ("It is not 18.", "18"),
        ("less than 18", "18"),
        ("the answer is 18 or nineteen", "18"),
        ("18 dozen", "18"),
        ("18 hundred eggs", "18"),
        ("18 dollars and fifty cents", "18"),
        ("18 fifths", "18"),
        ("18 squared", "18"),
        ("18x", "18"),
        ("18 x", "18"),
        ("x 18", "18"),
        ("i 18", "18"),
        ("18i", "18"),
        ("18!", "18"),
        ("18 pi", "18"),
        ("18 sin theta", "18"),
        ("2**3", "23"),
        ("18 1/2", "18"),
        ("18 eggs", "18 dollars"),
        ("19 dollars", "18"),
        ("18...", "18"),
        ("1", "1e3"),
        ("1e2", "1e3"),
        ("0.0000002", "1e-7"),
        ("2e-7", "1e-7"),
        ("0.0", "1e-7"),
        (r"\text{Evelyn}", r"\text{Bob}"),
        ("}{", "5"),
        (r"\frac{1}{", "1"),
        ("", "5"),
    ],
)
def test_other_answers_are_wrong(answer: str, expected: str) -> None:
    assert not is_right(f"So it is \\boxed{{{answer}}}.", expected, tags_required=False)


@pytest.mark.parametrize(
    ("response", "tags_required", "answer"),
    [
        (r"\boxed{1} then \boxed{ 2 }", False, "2"),
        (r"\boxed{\frac{1}{2}} \boxed{3", False, r"\frac{1}{2}"),
        (r"\boxed{a\}b} c}", False, r"a\}b"),
        (r"\boxed {x} <answer>7</answer>", False, "x"),
        (r"<answer>7</answer> 8", False, "7"),
        (r"<answer>is \boxed{7}</answer> \boxed{8}", True, "7"),
        (r"\boxed{8}", True, None),
        ("it is 8", False, ""),
        ("</answer> 8 <answer>", False, ""),
        (r"\boxed{}", False, None),
        (r"\boxed{" + "1" * (LONGEST_ANSWER + 1) + "}", False, None),
        (r"\boxed{5} \boxed{" + "1" * 9999 + "}", False, None),
        (r"{ \boxed{5} \} } } {", False, "5"),
        ("<answer>" + "1" * (LONGEST_ANSWER + 1) + "</answer>", True, None),
    ],
)
def test_where_the_answer_is_taken_from(response: str, tags_required: bool, answer: str | None) -> None:
    assert extract_answer(response, tags_required) == answer


def test_boxes_nest() -> None:
    assert last_boxed(r"\boxed{1 + \boxed{2}} and no \boxed") == "2"
    assert last_boxed("{" * 10_000 + r"\boxed{" * 200) is None


@pytest.mark.parametrize(
    ("response", "expected", "right"),
    [
        ("The answer is 42.", "42", True),
        ("we get 12 + 30 = 42", "42", True),
        (r"so $x = \frac{3}{4}$ it is", "0.75", True),
        ("the answer is 50%", "0.5", True),
        ("we get 18 dollars.", "18", True),
        ("we get 1.8e1 dollars.", "18", True),
        ("we get 1e3.", "1", False),
        ("we get 0.001", "1e-3", True),
        ("I do not know", "5", False),
        ("42 " + "word " * LONGEST_ANSWER, "42", False),
        ("", "1", False),
    ],
)
def test_without_box_and_tags_the_last_expression_counts(response: str, expected: str, right: bool) -> None:
    assert is_right(response, expected, tags_required=False) == right


HOSTILE = [  # each takes longer than a second
    r"\boxed{10^{10^{10}}}",
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{((10!)!)!}",
    r"\boxed{1000000000!}",
    r"\boxed{2^{2^{2^{2^{2^{2}}}}}}",
    r"\boxed{\sum_{k=1}^{100000000000} \sin(k)^k}",
    r"\boxed{\int_0^1 \sin(\cos(\tan(x^{x^{x}})))^{\log(x+2)} dx}",
    r"\boxed{" + r"\frac{1}{" * 80 + "x" + "}" * 80 + "}",
    r"\boxed{" + "(" * 490 + "x" + ")" * 490 + "}",
    r"\boxed{(x+y+z+w)^{400}}",
]
UNREADABLE = [  # no mathematics, or too long: simply wrong
    r"\boxed{" * 150,
    r"\boxed{{{{{{{",
    "{" * 3000,
    r"\boxed{" + r"\frac" * 190 + "}",
    "9" * 4000,
    "$" * 2000,
]


@pytest.mark.process
def test_hostile_answers_cost_their_deadlines_and_nothing_else(
    make_config: MakeConfig, model_dir: Path, tmp_path: Path, forkserver: None
) -> None:
    """100 hostile answers, with right and wrong ones between them."""
    del forkserver
    deadline_s = 0.3
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": f"q{n}", "answer": r"\frac{1}{2}"}) + "\n" for n in range(2))
    )
    hostile = HOSTILE * 4 + UNREADABLE * 10
    right, wrong = r"so \boxed{0.5}", r"so \boxed{0.7}"
    responses = [text for deed in hostile for text in (deed, right, wrong)]
    tokenizer = Tokenizer(str(model_dir))
    config = make_config(
        task={"name": "jsonl", "path": str(tmp_path / "p.jsonl"), "verifier": "math", "deadline_s": deadline_s},
        evaluation={"prompts": 1},
    )
    grader = Grader(config, str(tmp_path / "task.log"), task_worker.main)
    with contextlib.ExitStack() as stack:
        stack.callback(grader.stop, 0.1)
        grader.start(time.monotonic())
        grader.encode(-1, Purpose.TRAIN, 0)
        take(grader, 1)
        worker = grader.pid
        begun = time.monotonic()
        for trajectory, text in enumerate(responses):
            grader.grade(trajectory, Purpose.TRAIN, 0, np.asarray(tokenizer.encode(text), "<i4").tobytes())
        outcomes = take(grader, len(responses))
        took_s = time.monotonic() - begun
        assert (grader.pid, grader.restarts) == (worker, 0)
    assert len(hostile) == 100
    assert took_s < 3 * len(hostile) * deadline_s
    assert [(outcome.verdict, outcome.reward) for outcome in outcomes[1::3]] == [(Verdict.GRADED, 1.0)] * 100
    assert [(outcome.verdict, outcome.reward) for outcome in outcomes[2::3]] == [(Verdict.GRADED, 0.0)] * 100
    bad = outcomes[::3]
    assert {outcome.reward for outcome in bad} == {0.0}  # none of them passes for right
    assert sum(outcome.verdict is Verdict.DEADLINE for outcome in bad[:40]) >= 20
    assert {outcome.verdict for outcome in bad[40:]} <= {Verdict.GRADED, Verdict.RAISED}


def take(grader: Grader, count: int) -> list[Outcome]:
    """The next `count` outcomes; the test fails where they do not come."""
    outcomes: list[Outcome] = []
    begun = time.monotonic()
    while len(outcomes) < count:
        assert time.monotonic() - begun < 100, f"{len(outcomes)} of {count}, waiting for {grader.waiting_for()}"
        wait_any(grader.channels(), 0.02)
        outcomes += grader.poll(time.monotonic())
    return outcomes
