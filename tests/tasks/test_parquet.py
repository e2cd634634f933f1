"""Prompts from a Parquet file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from laminar_hpc.config.schema import Config  # noqa: E402
from laminar_hpc.errors import ConfigError  # noqa: E402
from laminar_hpc.protocol.trajectory import Purpose  # noqa: E402
from laminar_hpc.tasks.file_task import FileTask  # noqa: E402

TRAIN, EVALUATION = Purpose.TRAIN, Purpose.EVALUATION

MakeConfig = Callable[..., Config]


def make_task(make_config: MakeConfig, path: Path, rows: Any, **task: object) -> FileTask:
    """The task of a new file with these rows, of which the last is held out."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    pq.write_table(table, path, row_group_size=2)
    return FileTask(make_config(task={"name": "parquet", "path": str(path), **task}, evaluation={"prompts": 1}))


def test_rows_come_in_order_whatever_the_row_groups(make_config: MakeConfig, tmp_path: Path) -> None:
    rows = [{"id": n, "answer": str(n), "prompt": f"q{n}"} for n in range(3000)]
    task = make_task(make_config, tmp_path / "p.parquet", rows)
    assert [task.text(TRAIN, n) for n in range(2999)] == [f"q{n}" for n in range(2999)]
    assert task.solution(EVALUATION, 0) == "2999"


def test_dapo_math_17k_rows(make_config: MakeConfig, tmp_path: Path) -> None:
    """As on https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k, where each row stands many times."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"Solve the following math problem: {n} + 1?", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(n + 1), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{n}"},
        }
        for n in (1, 2, 1, 2, 33)
    ]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}["
    )
    task = FileTask(
        make_config(
            model={"path": str(tmp_path / "model")},
            task={
                "name": "parquet",
                "path": write(tmp_path / "p.parquet", rows),
                "answer_column": "reward_model.ground_truth",
                "chat": True,
            },
            evaluation={"prompts": 1},
        )
    )
    assert (task.prompts, task.held_out) == (4, 1)
    assert task.text(TRAIN, 2) == "[user]Solve the following math problem: 1 + 1?["
    assert [task.solution(TRAIN, n) for n in range(4)] == ["2", "3", "2", "3"]
    assert task.grade(EVALUATION, 0, " 34 ") == 1.0


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_only_the_columns_that_are_used_are_read(make_config: MakeConfig, tmp_path: Path) -> None:
    """The bytes of the other column, and of the other part of the nested one, are overwritten with rubbish."""
    marker = "0123456789abcdef" * 50
    rows = [{"other": marker, "prompt": f"q{n}", "of": {"junk": marker, "answer": str(n)}} for n in range(4)]
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, compression="none", use_dictionary=False, write_statistics=False)
    content = path.read_bytes()
    broken = content.replace(marker.encode(), b"\xff" * len(marker))
    assert content.count(marker.encode()) == broken.count(b"\xff" * len(marker)) == 8
    path.write_bytes(broken)
    config = make_config(
        task={"name": "parquet", "path": str(path), "answer_column": "of.answer"}, evaluation={"prompts": 1}
    )
    assert FileTask(config).solution(TRAIN, 2) == "2"
    config = make_config(task={"name": "parquet", "path": str(path), "answer_column": "other"})
    with pytest.raises(ConfigError, match=r"p\.parquet:1: not UTF-8: byte 1 of the text is 0xff"):
        FileTask(config)


GOOD = {"prompt": "p", "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "p", "label": "1"}] * 2, ["no column 'answer'", "task.answer_column", "there are: prompt, label"]),
        ([{"prompt": "p", "answer": 5}] * 2, [":1:", "answer", "must be a text, got a number"]),
        ([GOOD, {"prompt": None, "answer": "1"}], [":2:", "prompt", "got null"]),
        ([GOOD, {"prompt": "p", "answer": ""}], [":2:", "answer", "is empty"]),
        ([{"prompt": [{"role": "user", "content": "x"}], "answer": "1"}] * 2, [":1:", "needs task.chat = true"]),
        (pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), ["is empty"]),
    ],
)
def test_a_bad_row_is_named(make_config: MakeConfig, tmp_path: Path, rows: Any, words: list[str]) -> None:
    path = tmp_path / "p.parquet"
    with pytest.raises(ConfigError) as caught:
        make_task(make_config, path, rows)
    for word in [str(path), *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_text_that_is_not_utf8_is_named_with_its_row(make_config: MakeConfig, tmp_path: Path) -> None:
    texts = pa.Array.from_buffers(
        pa.string(),
        3,
        [None, pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0])), pa.py_buffer(b"ab\xffc")],
    )
    with pytest.raises(ConfigError, match=r"p\.parquet:2: not UTF-8: byte 2 of the text is 0xff"):
        make_task(make_config, tmp_path / "p.parquet", pa.table({"prompt": texts, "answer": ["1", "2", "3"]}))


@pytest.mark.parametrize("damage", ["cut", "rubbish", "jsonl", "nothing"])
def test_a_corrupt_file_is_named(make_config: MakeConfig, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": f"question {n}", "answer": str(n)} for n in range(50)]), path)
    content = path.read_bytes()
    damaged = {
        "cut": content[:-20],
        "rubbish": content[:4] + b"\xff" * 200 + content[204:],
        "jsonl": b'{"prompt": "p", "answer": "1"}\n',
        "nothing": b"",
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(ConfigError, match=r"p\.parquet: not a whole Parquet file, after row 0: ") as caught:
        FileTask(make_config(task={"name": "parquet", "path": str(path)}))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.path: .*none: cannot be read: No such file or directory"):
        FileTask(make_config(task={"name": "parquet", "path": str(tmp_path / "none")}))
