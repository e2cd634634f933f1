"""Prompts from files: what they share, and JSON Lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.file_task import FileTask

TRAIN, EVALUATION = Purpose.TRAIN, Purpose.EVALUATION

MakeConfig = Callable[..., Config]


def rows(*pairs: tuple[str, str], **extra: object) -> bytes:
    return b"".join(json.dumps({"prompt": p, "answer": a, **extra}).encode() + b"\n" for p, a in pairs)


def numbered(count: int) -> list[tuple[str, str]]:
    return [(f"q{index}", str(index)) for index in range(count)]


def make_task(make_config: MakeConfig, path: Path, content: bytes, prompts: int = 2, **task: object) -> FileTask:
    path.write_bytes(content)
    return FileTask(make_config(task={"name": "jsonl", "path": str(path), **task}, evaluation={"prompts": prompts}))


def test_the_last_rows_are_held_out(make_config: MakeConfig, tmp_path: Path) -> None:
    task = make_task(make_config, tmp_path / "p.jsonl", rows(*numbered(5)), template="Q: {prompt} {x}")
    assert (task.prompts, task.held_out) == (3, 2)
    assert [task.text(TRAIN, index) for index in range(3)] == ["Q: q0 {x}", "Q: q1 {x}", "Q: q2 {x}"]
    assert [task.text(EVALUATION, index) for index in range(2)] == ["Q: q3 {x}", "Q: q4 {x}"]
    assert task.grade(EVALUATION, 1, " 4\n") == 1.0
    assert task.grade(EVALUATION, 1, "3") == 0.0


def test_held_out_prompts_come_from_their_own_file_and_are_never_trained_on(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "h.jsonl").write_bytes(rows(("q1", "1"), ("new", "2"), ("unused", "3")))
    task = make_task(make_config, tmp_path / "p.jsonl", rows(*numbered(3)), held_out_path=str(tmp_path / "h.jsonl"))
    assert [task.text(TRAIN, index) for index in range(task.prompts)] == ["q0", "q2"]
    assert [task.text(EVALUATION, index) for index in range(task.held_out)] == ["q1", "new"]


@pytest.mark.parametrize("order", ["copies side by side", "copies of the whole"])
def test_a_row_that_is_there_many_times_counts_once(make_config: MakeConfig, tmp_path: Path, order: str) -> None:
    pairs = numbered(20) * 100
    if order == "copies side by side":
        pairs.sort(key=lambda pair: int(pair[1]))
    task = make_task(make_config, tmp_path / "p.jsonl", rows(*pairs), prompts=5)
    assert [task.text(EVALUATION, n) for n in range(task.held_out)] == [f"q{n}" for n in range(15, 20)]
    assert [task.text(TRAIN, n) for n in range(task.prompts)] == [f"q{n}" for n in range(15)]


def test_a_prompt_with_two_answers_is_held_out_once_and_not_trained_on(make_config: MakeConfig, tmp_path: Path) -> None:
    content = rows(("a", "1"), ("b", "1"), ("c", "1"), ("b", "2"), ("a", "2"))
    task = make_task(make_config, tmp_path / "p.jsonl", content)
    assert [(task.text(EVALUATION, n), task.solution(EVALUATION, n)) for n in range(2)] == [("b", "1"), ("c", "1")]
    assert [(task.text(TRAIN, n), task.solution(TRAIN, n)) for n in range(task.prompts)] == [("a", "1"), ("a", "2")]
    (tmp_path / "h.jsonl").write_bytes(rows(("a", "1"), ("a", "2"), ("d", "1")))
    task = make_task(make_config, tmp_path / "p.jsonl", content, held_out_path=str(tmp_path / "h.jsonl"))
    assert [task.text(EVALUATION, n) for n in range(2)] == ["a", "d"]
    assert [task.text(TRAIN, n) for n in range(task.prompts)] == ["b", "c", "b"]


def test_a_held_out_file_may_hold_all_that_there_is(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_bytes(rows(*numbered(3)))
    with pytest.raises(ConfigError, match="every prompt is also a held-out prompt"):
        make_task(make_config, tmp_path / "p.jsonl", rows(*numbered(2)), held_out_path=str(tmp_path / "h.jsonl"))


def test_without_evaluation_all_rows_are_trained_on(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(rows(*numbered(3)))
    task = FileTask(make_config(task={"name": "jsonl", "path": str(path)}, evaluation={"every": 0}))
    assert (task.prompts, task.held_out) == (3, 0)


def test_other_keys_a_missing_last_newline_and_any_unicode_are_fine(make_config: MakeConfig, tmp_path: Path) -> None:
    content = rows(("a\u2028b", "\u00e9"), ("c", "d"), ("e", "f"), source=[1, {}]).rstrip(b"\n")
    task = make_task(make_config, tmp_path / "p.jsonl", content, prompts=1)
    assert task.text(TRAIN, 0) == "a\u2028b"
    assert task.grade(TRAIN, 0, "\u00e9") == 1.0


@pytest.mark.parametrize("template", ["{prompt}", "{prompt} <answer>?</answer>"])
def test_solutions_are_right(make_config: MakeConfig, tmp_path: Path, template: str) -> None:
    task = make_task(make_config, tmp_path / "p.jsonl", rows(("a", "x y"), ("b", "2"), ("c", "3")), template=template)
    assert "x y" in task.solution(TRAIN, 0)
    assert [task.grade(EVALUATION, index, task.solution(EVALUATION, index)) for index in range(2)] == [1.0, 1.0]


def test_the_number_verifier_takes_the_last_number(make_config: MakeConfig, tmp_path: Path) -> None:
    task = make_task(make_config, tmp_path / "p.jsonl", rows(("a", "0.5"), ("b", "2"), ("c", "3")), verifier="number")
    assert task.grade(TRAIN, 0, "first 3, then 1/2") == 1.0
    assert task.grade(TRAIN, 0, "first 1/2, then 3") == 0.0
    assert task.grade(TRAIN, 0, "<answer>.50</answer> 3") == 1.0


def test_a_template_with_tags_asks_for_tags(make_config: MakeConfig, tmp_path: Path) -> None:
    template = "{prompt} Answer as <answer>...</answer>."
    task = make_task(make_config, tmp_path / "p.jsonl", rows(*numbered(3)), template=template)
    assert task.grade(TRAIN, 0, "0") == 0.0
    assert task.grade(TRAIN, 0, "<answer>0</answer>") == 1.0


GOOD = b'{"prompt": "p", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (GOOD + b'{"prompt": "x", "answer": }\n', [":2:", "must be a JSON object"]),
        (GOOD + GOOD + b'{"prompt": "x"}\n', [":3:", "'answer'", "task.answer_column", "there are: prompt"]),
        (GOOD + b'{"prompt": "x", "answer": 5}\n', [":2:", "answer", "must be a text, got a number"]),
        (GOOD + b'{"prompt": null, "answer": "5"}\n', [":2:", "prompt", "must be a text or a list", "got null"]),
        (GOOD + b'{"prompt": " ", "answer": "5"}\n', [":2:", "prompt", "is empty"]),
        (GOOD + b'{"prompt": "x", "answer": "#### "}\n', [":2:", "answer", "is empty"]),
        (GOOD + b'{"prompt": [], "answer": "5"}\n', [":2:", "needs task.chat = true"]),
        (b"[" * 100_000 + b"\n", [":1:", "must be a JSON object"]),
        (b'["p", "1"]\n', [":1:", "`object`", "`array`"]),
        (GOOD + b"\n" + GOOD, [":2:"]),
        (GOOD + b'{"prompt": "\xff", "answer": "1"}\n', [":2:", "UTF-8", "0xff"]),
        (b"", ["is empty"]),
        (rows(*numbered(2)), ["2 different prompts", "evaluation.prompts = 2", "task.held_out_path"]),
        (GOOD * 5, ["1 different prompts", "evaluation.prompts = 2"]),
        (rows(("a", "1"), ("a", "2"), ("b", "1")), ["2 different prompts", "evaluation.prompts = 2"]),
    ],
)
def test_a_broken_file_is_named_with_its_row(
    make_config: MakeConfig, tmp_path: Path, content: bytes, words: list[str]
) -> None:
    path = tmp_path / "p.jsonl"
    with pytest.raises(ConfigError) as caught:
        make_task(make_config, path, content)
    for word in [str(path), *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_answers_must_be_numbers_for_the_number_verifier(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: task\.verifier = 'number' needs a number .* got 'two'"):
        make_task(
            make_config, tmp_path / "p.jsonl", rows(("a", "1"), ("b", "two"), ("c", "3"), ("d", "4")), verifier="number"
        )


@pytest.mark.parametrize(("key", "path"), [("path", "none.jsonl"), ("held_out_path", "none.jsonl"), ("path", ".")])
def test_a_file_that_cannot_be_read_is_named(make_config: MakeConfig, tmp_path: Path, key: str, path: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(GOOD * 3)
    paths = {"path": str(tmp_path / "p.jsonl"), key: str(tmp_path / path)}
    with pytest.raises(ConfigError, match=rf"task\.{key}: .*{path}: cannot be read"):
        FileTask(make_config(task={"name": "jsonl", **paths}))


def test_a_held_out_file_that_is_too_short_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_bytes(GOOD * 2)
    with pytest.raises(ConfigError, match=r"h\.jsonl has 1 different prompts; evaluation\.prompts = 2"):
        make_task(make_config, tmp_path / "p.jsonl", rows(*numbered(9)), held_out_path=str(tmp_path / "h.jsonl"))


def test_a_pipe_is_not_waited_for(make_config: MakeConfig, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"task\.path: .*pipe: cannot be read: it is no regular file"):
        FileTask(make_config(task={"name": "jsonl", "path": str(tmp_path / "pipe")}))


def test_gsm8k_rows(make_config: MakeConfig, tmp_path: Path) -> None:
    """As on https://huggingface.co/datasets/openai/gsm8k: what follows #### is the answer, with thousands' commas."""
    rows_ = [
        {"question": "How many?", "answer": "48 / 2 = <<48/2=24>>24 clips.\n48 + 24 = <<48+24=72>>72.\n#### 72"},
        {"question": "How much?", "answer": "It is $1,000 and $234.\n#### 1,234"},
        {"question": "How old?", "answer": "#### -5"},
    ]
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows_)
    task = make_task(make_config, tmp_path / "p.jsonl", content, prompts=1, prompt_column="question", verifier="number")
    assert (task.text(TRAIN, 0), task.solution(TRAIN, 0), task.solution(TRAIN, 1)) == ("How many?", "72", "1,234")
    assert task.grade(TRAIN, 0, "She sold 48 and 24, so 72 clips.") == 1.0
    assert task.grade(TRAIN, 1, "1234") == 1.0
    assert task.grade(EVALUATION, 0, "5") == 0.0


def test_nested_columns(make_config: MakeConfig, tmp_path: Path) -> None:
    lines = [{"in": {"text": f"q{n}"}, "out": {"a.b": [1], "truth": str(n)}, "a.b": str(n + 10)} for n in range(3)]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    columns = {"prompt_column": "in.text", "answer_column": "out.truth"}
    task = make_task(make_config, tmp_path / "p.jsonl", content, prompts=1, **columns)
    assert (task.text(TRAIN, 1), task.solution(TRAIN, 1)) == ("q1", "1")
    columns["answer_column"] = "a.b"  # a column of that very name comes first
    task = make_task(make_config, tmp_path / "p.jsonl", content, prompts=1, **columns)
    assert task.solution(TRAIN, 1) == "11"
    columns["answer_column"] = "out.what"
    with pytest.raises(
        ConfigError, match=r":1: no column 'out\.what' \(task\.answer_column\); at 'what' .* a\.b, truth"
    ):
        make_task(make_config, tmp_path / "p.jsonl", content, prompts=1, **columns)
