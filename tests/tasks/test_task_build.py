"""Which task a config gets, and the check at the door."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.tasks.build import build_task, check_task, prompt_counts
from laminar_hpc.tasks.file_task import FileTask
from laminar_hpc.tasks.reasoning_gym_task import ReasoningGymTask

MakeConfig = Callable[..., Config]


def jsonl(tmp_path: Path, *prompts: str) -> dict[str, object]:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "{prompt}", "answer": "1"}}\n' for prompt in prompts))
    return {"name": "jsonl", "path": str(path)}


def test_the_config_chooses(make_config: MakeConfig, tmp_path: Path) -> None:
    assert isinstance(build_task(make_config()), ReasoningGymTask)
    config = make_config(task=jsonl(tmp_path, "a", "b", "c"), evaluation={"prompts": 1})
    assert isinstance(build_task(config), FileTask)


def test_counts_are_those_of_the_built_task(make_config: MakeConfig, tmp_path: Path) -> None:
    for config in (
        make_config(task={"prompts": 70}, evaluation={"prompts": 30}),
        make_config(task={"prompts": 70}, evaluation={"every": 0}),
        make_config(task=jsonl(tmp_path, "a", "b", "c", "d"), evaluation={"prompts": 1}),
    ):
        task = build_task(config)
        assert prompt_counts(config) == (task.prompts, task.held_out) == check_task(config)


@pytest.mark.parametrize(
    ("prompts", "place"), [(["abcd", "b", "c"], "train prompt 0"), (["a", "b", "abcd"], "evaluation prompt 0")]
)
def test_a_prompt_that_is_too_long_stops_at_the_door(
    make_config: MakeConfig, tmp_path: Path, prompts: list[str], place: str
) -> None:
    config = make_config(task=jsonl(tmp_path, *prompts), evaluation={"prompts": 1}, rollout={"max_prompt_tokens": 3})
    with pytest.raises(ConfigError, match=rf"{place} has 4 tokens; rollout\.max_prompt_tokens allows 1 to 3"):
        check_task(config)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (150, r"train prompt 150 \(at 'käse'\) has 'ä', for which the tokenizer in model\.path has no token"),
        (299, r"evaluation prompt 4 \(at 'käse'\) has 'ä'"),
    ],
)
def test_a_character_that_the_model_cannot_see_stops_at_the_door(
    make_config: MakeConfig, tmp_path: Path, odd: int, says: str
) -> None:
    """One row of 300, the last 5 of which are held out: a sample would miss it."""
    prompts = [f"cheese {number}" for number in range(300)]
    prompts[odd] = "käse"
    with pytest.raises(ConfigError, match=says):
        check_task(make_config(task=jsonl(tmp_path, *prompts)))


def test_the_name_of_a_control_token_is_text_that_the_model_can_see(make_config: MakeConfig, tmp_path: Path) -> None:
    prompts = ["what is <unk>?", *map(str, range(9))]
    assert check_task(make_config(task=jsonl(tmp_path, *prompts))) == (5, 5)


def test_a_penalty_longer_than_responses_stops_at_the_door(make_config: MakeConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"overlong_tokens must be at most rollout\.max_response_tokens \(64\), got 65"
    ):
        check_task(make_config(task={"overlong_tokens": 65}, rollout={"max_response_tokens": 64}))


def test_a_model_directory_without_tokenizer_stops_at_the_door(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        check_task(make_config(model={"path": str(tmp_path)}))


FOR_FILES = ["pyarrow", "jinja2", "math_verify"]


@pytest.mark.parametrize(
    ("name", "absent"), [("jsonl", ["reasoning_gym", *FOR_FILES]), ("reasoning_gym", ["pyarrow", "math_verify"])]
)
def test_only_the_chosen_task_is_imported_and_never_torch(
    make_config: MakeConfig, tmp_path: Path, name: str, absent: list[str]
) -> None:
    task = jsonl(tmp_path, "a", "b", "c") if name == "jsonl" else {"parameters": {"max_terms": 2}}
    (tmp_path / "c.json").write_text(make_config(task=task, evaluation={"prompts": 1}).model_dump_json())
    script = (
        "import sys; from laminar_hpc.config.schema import Config; from laminar_hpc.tasks.build import check_task; "
        f"check_task(Config.model_validate_json(open({str(tmp_path / 'c.json')!r}).read())); "
        f"print([m for m in ['torch', 'transformers', 'mpi4py', *{absent}] if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
