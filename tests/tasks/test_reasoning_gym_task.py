"""reasoning-gym behind the task interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.reasoning_gym_task import ReasoningGymTask

TRAIN, EVALUATION = Purpose.TRAIN, Purpose.EVALUATION
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}

MakeConfig = Callable[..., Config]


def make_task(make_config: MakeConfig, seed: int = 0, held_out: int = 20, **task: object) -> ReasoningGymTask:
    return ReasoningGymTask(make_config(job={"seed": seed}, task=task, evaluation={"prompts": held_out}))


def texts(task: ReasoningGymTask, purpose: Purpose) -> list[str]:
    return [task.text(purpose, index) for index in range(task.prompts if purpose is TRAIN else task.held_out)]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**40), other=st.integers(0, 2**40), prompts=st.integers(1, 300))
def test_no_held_out_question_is_trained_on_under_any_seed(
    model_dir: Path, seed: int, other: int, prompts: int
) -> None:
    def task_of(seed: int) -> ReasoningGymTask:
        data = {
            "run_dir": "/run",
            "model": {"path": str(model_dir)},
            "job": {"seed": seed},
            "evaluation": {"prompts": 20},
        }
        return ReasoningGymTask(Config.model_validate({**data, "task": {"prompts": prompts, "parameters": ONE_DIGIT}}))

    held_out = texts(task_of(seed), EVALUATION)
    assert len(held_out) == len(set(held_out)) == 20
    assert not set(held_out) & (set(texts(task_of(seed), TRAIN)) | set(texts(task_of(other), TRAIN)))


def test_prompts_depend_on_the_seed_alone_and_in_any_order(make_config: MakeConfig) -> None:
    first, second = (make_task(make_config, prompts=100) for _ in range(2))
    assert texts(first, TRAIN) == [second.text(TRAIN, index) for index in reversed(range(100))][::-1]
    assert texts(first, EVALUATION) == texts(second, EVALUATION)


def test_neighbouring_seeds_share_no_run_of_prompts(make_config: MakeConfig) -> None:
    first, second = (set(texts(make_task(make_config, seed=seed, prompts=200), TRAIN)) for seed in (0, 1))
    assert len(first) > 190
    assert len(first & second) < 10


def test_two_processes_see_the_same_prompts_even_of_a_data_set_that_draws_from_sets(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(task={"dataset": "ransom_note", "prompts": 8}, rollout={"max_prompt_tokens": 4096})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    line = [sys.executable, str(Path(__file__).parent / "print_prompts.py"), str(tmp_path / "config.json")]
    runs = [
        subprocess.Popen([*line, str(tmp_path / f"{n}.log")], stdout=subprocess.PIPE, text=True, env=environment)
        for n in (0, 1)
    ]
    first, second = (json.loads(run.communicate(timeout=60)[0]) for run in runs)
    assert len(first) == 13
    assert first == second


def test_ten_thousand_prompts_cost_nothing_at_the_start(make_config: MakeConfig) -> None:
    begun = time.perf_counter()
    task = make_task(make_config, held_out=200, prompts=10_000, parameters=TWO_DIGITS)
    assert time.perf_counter() - begun < 2.0
    assert (task.prompts, task.held_out) == (10_000, 200)


def test_answers_are_graded_by_the_data_set(make_config: MakeConfig) -> None:
    task = make_task(make_config, parameters=TWO_DIGITS)
    for purpose in (TRAIN, EVALUATION):
        expression = task.text(purpose, 3).removeprefix("State the final answer to the following arithmetic problem: ")
        left, sign, right, _ = expression.split()
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert task.grade(purpose, 3, f" {value}\n") == 1.0
        assert task.grade(purpose, 3, f"because <answer>{value}</answer>") == 1.0
        assert task.grade(purpose, 3, str(value + 1)) < 1.0


@pytest.mark.parametrize("template", ["{prompt}", "{prompt} <answer>?</answer>"])
@pytest.mark.parametrize("dataset", ["chain_sum", "gsm_symbolic", "letter_counting", "countdown"])
def test_solutions_are_right(make_config: MakeConfig, dataset: str, template: str) -> None:
    task = make_task(make_config, held_out=1, dataset=dataset, template=template)
    assert [task.grade(TRAIN, index, task.solution(TRAIN, index)) for index in range(5)] == [1.0] * 5


def test_a_template_with_tags_asks_for_tags(make_config: MakeConfig) -> None:
    task = make_task(make_config, parameters=TWO_DIGITS, template="{prompt} <answer>?</answer>")
    left, sign, right = task.text(TRAIN, 0).split(":")[1].split()[:3]
    value = int(left) + int(right) if sign == "+" else int(left) - int(right)
    assert task.grade(TRAIN, 0, str(value)) == 0.0
    assert task.grade(TRAIN, 0, f"<answer>{value}</answer>") == 1.0


def test_data_sets_that_make_all_entries_in_advance_work(make_config: MakeConfig) -> None:
    task = make_task(make_config, dataset="gsm_symbolic", prompts=30)
    assert len(texts(task, TRAIN)) == 30


def test_without_evaluation_nothing_is_held_out(make_config: MakeConfig) -> None:
    assert ReasoningGymTask(make_config(evaluation={"every": 0})).held_out == 0


def test_the_search_for_held_out_prompts_can_be_cut_short(make_config: MakeConfig) -> None:
    assert ReasoningGymTask(make_config(evaluation={"prompts": 1000}), search_limit_s=0.0).held_out < 1000


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"dataset": "chainsum"}, ["task.dataset", "'chainsum'", "did you mean chain_sum"]),
        ({"dataset": "?"}, ["task.dataset", "there are:", "chain_sum", "sudoku"]),
        ({"parameters": {"max_term": 3}}, ["task.parameters", "'max_term'", "max_terms", "min_digits"]),
        ({"parameters": {"max_terms": 1}}, ["task.parameters", "max_terms must be >= min_terms"]),
        ({"parameters": {"max_terms": "many"}}, ["task.parameters", "chain_sum"]),
        ({"parameters": {"seed": 3}}, ["task.parameters.seed", "job.seed"]),
        ({"parameters": {"size": 3}}, ["task.parameters.size", "task.prompts"]),
        ({"parameters": ONE_DIGIT}, ["only ", "different held-out questions", "evaluation.prompts = 200"]),
    ],
)
def test_what_cannot_be_drawn_from_is_explained(
    make_config: MakeConfig, task: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        ReasoningGymTask(make_config(task=task, evaluation={"prompts": 200}))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_number_of_questions_that_there_are_is_exact_where_all_can_be_drawn(make_config: MakeConfig) -> None:
    """Two digits from 0 to 9, plus or minus: 200 questions, of which those with a digest of 0 modulo 4 are held out."""
    import hashlib

    questions = [
        f"State the final answer to the following arithmetic problem: {left} {sign} {right} ="
        for left in range(10)
        for right in range(10)
        for sign in "+-"
    ]
    held_out = sum(hashlib.sha256(question.encode()).digest()[0] % 4 == 0 for question in questions)
    with pytest.raises(ConfigError, match=f"only {held_out} different"):
        make_task(make_config, held_out=200, parameters=ONE_DIGIT)
    assert make_task(make_config, held_out=held_out, parameters=ONE_DIGIT).held_out == held_out
