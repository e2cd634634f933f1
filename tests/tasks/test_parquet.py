"""Prompts from a Parquet file."""

from __future__ import annotations

import os
import subprocess
import sys
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
    assert (task.prompts, task.held_out) == (2, 1)
    assert task.text(TRAIN, 0) == "[user]Solve the following math problem: 1 + 1?["
    assert [task.solution(TRAIN, n) for n in range(2)] == ["2", "3"]
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


TEXTS = pa.array(["1", "2"])
DATES = {
    "timestamp[ns]": pa.array([1, 2], pa.timestamp("ns")),  # as Python's datetime they would need pandas
    "duration[ns]": pa.array([1, 2], pa.duration("ns")),
    "timestamp[us]": pa.array([2**62, 2**62], pa.timestamp("us")),  # no year that Python knows
    "date32[day]": pa.array([2**31 - 1] * 2, pa.int32()).cast(pa.date32()),
    "time64[ns]": pa.array([1, 2], pa.time64("ns")),
    "binary": pa.array([b"p", b"q"]),
    "map<string, string": pa.array([[("a", "b")]] * 2, pa.map_(pa.string(), pa.string())),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", list(DATES))
def test_a_column_that_holds_other_things_than_texts_is_named_with_its_type(
    make_config: MakeConfig, tmp_path: Path, kind: str, nested: bool
) -> None:
    column = pa.StructArray.from_arrays([TEXTS, DATES[kind]], ["content", "at"]) if nested else DATES[kind]
    with pytest.raises(ConfigError) as caught:
        make_task(make_config, tmp_path / "p.parquet", pa.table({"prompt": column, "answer": TEXTS}))
    for word in ("p.parquet: the column 'prompt' (task.prompt_column) is of the type " + kind, "must hold texts"):
        assert word in str(caught.value)


def test_types_of_columns_that_are_not_used_do_not_matter(make_config: MakeConfig, tmp_path: Path) -> None:
    others = {f"other {n}": column for n, column in enumerate(DATES.values())}
    answer = pa.StructArray.from_arrays([TEXTS.dictionary_encode(), DATES["timestamp[ns]"]], ["text", "at"])
    table = pa.table({**others, "prompt": pa.array(["p", "q"], pa.large_string()), "answer": answer})
    task = make_task(make_config, tmp_path / "p.parquet", table, answer_column="answer.text")
    assert (task.text(TRAIN, 0), task.solution(TRAIN, 0)) == ("p", "1")


@pytest.mark.parametrize(
    ("names", "task", "words"),
    [
        (["prompt", "answer", "prompt"], {}, "2 columns are named 'prompt' (task.prompt_column = 'prompt')"),
        (["prompt", "answer", "answer"], {}, "2 columns are named 'answer' (task.answer_column = 'answer')"),
        (["prompt", "of", "of"], {"answer_column": "of.truth"}, "2 columns are named 'of'"),
        (["prompt", "answer", "id", "id"], {}, ""),
    ],
)
def test_two_columns_of_one_name_are_refused_where_they_are_used(
    make_config: MakeConfig, tmp_path: Path, names: list[str], task: dict[str, str], words: str
) -> None:
    truth = pa.StructArray.from_arrays([TEXTS], ["truth"])
    columns = [truth if name == "of" else pa.array([f"{name} {n}" for n in range(2)]) for name in names]
    table = pa.Table.from_arrays(columns, names)
    if not words:
        assert make_task(make_config, tmp_path / "p.parquet", table, **task).solution(TRAIN, 0) == "answer 0"
        return
    with pytest.raises(ConfigError) as caught:
        make_task(make_config, tmp_path / "p.parquet", table, **task)
    assert f"p.parquet: {words}" in str(caught.value)


@pytest.mark.parametrize("column", ["of.truth", "of"])
def test_two_nested_columns_of_one_name_are_refused(make_config: MakeConfig, tmp_path: Path, column: str) -> None:
    twice = pa.StructArray.from_arrays([TEXTS, TEXTS], ["truth", "truth"])
    with pytest.raises(ConfigError, match=r"p\.parquet: .*(2 columns are|has two fields) named 'truth'"):
        make_task(make_config, tmp_path / "p.parquet", pa.table({"prompt": TEXTS, "of": twice}), answer_column=column)


def test_a_column_name_that_is_not_utf8_is_the_files_fault(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": TEXTS, "answer": TEXTS, "otherwise": TEXTS}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"otherwise", b"other\xff\xfe\xfd\xfc"))
    with pytest.raises(ConfigError, match=r"p\.parquet: not a whole Parquet file, after row 0: 'utf-8'"):
        FileTask(make_config(task={"name": "parquet", "path": str(path)}))


READ_AT_THE_LIMIT = """
import sys
from laminar_hpc.tasks.parquet import iterate_rows
from laminar_hpc.tasks.worker import MEMORY_LIMIT_BYTES, limit_memory
limit_memory(MEMORY_LIMIT_BYTES)
print([row["prompt"] for _, row in iterate_rows(sys.argv[1], {"task.prompt_column": "prompt"})])
"""


def test_a_file_that_is_larger_than_the_workers_memory_is_read(tmp_path: Path) -> None:
    """The file has a hole of 5 GiB between its rows and what stands at its end; it takes no space on the disk."""
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), path)
    content = path.read_bytes()
    end = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    with path.open("wb") as file:
        file.write(content[:end])
        file.seek(5 << 30)
        file.write(content[end:])
    command = [sys.executable, "-c", READ_AT_THE_LIMIT, str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.stdout == "['a', 'b']\n", done.stderr


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
