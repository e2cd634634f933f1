"""Everything wrong that can be seen at the door: one line on stderr, exit code 2, soon, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from laminar_command import Laminar

from laminar_hpc.launch.mpiexec import environment, find_mpiexec

pytestmark = pytest.mark.job

DOOR_S = 15.0


def refused(laminar: Laminar, *arguments: object, names: str) -> None:
    """The command must refuse, in one line that has `names` in it, and leave the directory as it was."""
    before = sorted(laminar.directory.iterdir())
    done = laminar(*arguments, deadline_s=DOOR_S)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("laminar: ")
    assert names in lines[0]
    assert sorted(laminar.directory.iterdir()) == before


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("rollout.slotz=3", "unknown key rollout.slotz; did you mean slots?"),
        ("rolout.slots=3", "unknown key rolout; did you mean rollout?"),
        ("rollout.slots=many", "rollout.slots"),
        ("rollout.slots=0", "rollout.slots"),
        ("control.mode=sinc", "'laminar', 'sync', 'one_step', 'stream' or 'partial'"),
        ("rollout.engine=fast", "rollout.engine"),
        ("trainer.engine=fast", "trainer.engine"),
        ("job.rollouts=0", "job.rollouts"),
        ("task.dataset=chain_some", "chain_sum"),
        ("task.parameters={min_turms=3}", "min_turms"),
        ("task.template=hello", "{prompt}"),
        ("batch.minibatches=3", "batch.minibatches"),
        ("rollout.concurrency=2", "batch.group_size"),
        ("rollout.max_prompt_tokens=4", "rollout.max_prompt_tokens"),
        ("rollout", "SECTION.KEY=VALUE"),
        ("run_dir.x=1", "run_dir"),
    ],
)
def test_a_wrong_value_is_named(laminar: Laminar, override: str, names: str) -> None:
    refused(laminar, "run", laminar.config(), "--set", override, names=names)


def test_ranks_that_do_not_add_up(laminar: Laminar) -> None:
    refused(laminar, "run", laminar.config(job={"rollouts": 3, "relays": 2}), names="job.rollouts must be a multiple")


def test_a_missing_config(laminar: Laminar) -> None:
    refused(laminar, "run", "nowhere.toml", names="nowhere.toml")


def test_a_config_that_is_no_toml(laminar: Laminar) -> None:
    path = laminar.config()
    path.write_text(path.read_text() + "\n[broken\n")
    refused(laminar, "run", path, names="not valid TOML")


def test_a_missing_model(laminar: Laminar) -> None:
    refused(laminar, "run", laminar.config(model={"path": "no-model"}), names="no-model")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("fault", ["missing", "broken"])
def test_an_unreadable_model(laminar: Laminar, file: str, fault: str) -> None:
    copy = laminar.directory / "model"
    shutil.copytree(laminar.model, copy)
    if fault == "missing":
        (copy / file).unlink()
    else:
        (copy / file).write_bytes(b"{ neither JSON nor tensors")
    names = file if fault == "broken" or file != "model.safetensors" else "safetensors"
    refused(laminar, "run", laminar.config(model={"path": str(copy)}), names=names)


def test_a_prompt_file_with_a_broken_line(laminar: Laminar) -> None:
    lines = [json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(20)]
    lines[6] = '{"prompt": "7 + 1 =" "answer": "8"}'
    prompts = laminar.directory / "prompts.jsonl"
    prompts.write_text("\n".join(lines) + "\n")
    config = laminar.config(task={"name": "jsonl", "path": str(prompts)})
    refused(laminar, "run", config, names="prompts.jsonl:7:")


def test_a_missing_prompt_file(laminar: Laminar) -> None:
    refused(laminar, "run", laminar.config(task={"name": "jsonl", "path": "none.jsonl"}), names="none.jsonl")


def test_a_run_directory_that_exists(laminar: Laminar) -> None:
    laminar.run_dir.mkdir()
    (laminar.run_dir / "precious").write_text("kept")
    refused(laminar, "run", laminar.config(), names="exists already")
    assert os.listdir(laminar.run_dir) == ["precious"]


@pytest.mark.parametrize("place", ["/proc/run", "/dev/null/run"])
def test_a_run_directory_that_cannot_be_made(laminar: Laminar, place: str) -> None:
    refused(laminar, "run", laminar.config(), "--set", f"run_dir={place}", names="run_dir")


def test_a_report_on_nothing(laminar: Laminar) -> None:
    refused(laminar, "report", "nothing-here", names="nothing-here")


def test_a_model_directory_that_is_full(laminar: Laminar) -> None:
    (laminar.directory / "full").mkdir()
    (laminar.directory / "full" / "file").write_text("kept")
    refused(laminar, "model", "tiny", "full", names="full")


def test_a_dry_run_starts_nothing(laminar: Laminar) -> None:
    done = laminar("run", laminar.config(), "--dry-run", deadline_s=DOOR_S)
    assert done.returncode == 0, done.stderr
    ranks, srun, line = done.stdout.splitlines()
    assert ranks == "5 ranks"
    assert srun.startswith("srun ")
    assert " -n 5 " in srun
    assert "mpiexec" in line
    assert "-n 5" in line
    assert not Path(laminar.run_dir).exists()


def test_a_dry_run_counts_the_ranks_of_a_job_for_other_machines(laminar: Laminar) -> None:
    laminar.run_dir.mkdir()
    done = laminar("run", laminar.config(job={"rollouts": 100_000}), "--dry-run", deadline_s=DOOR_S)
    assert done.returncode == 0, done.stderr
    ranks, srun, line, *notes = done.stdout.splitlines()
    assert ranks == "100003 ranks"
    assert " -n 100003 " in srun
    assert " -n 100003 " in line
    assert [note.split(":")[0] for note in notes] == ["note"] * len(notes)
    assert "on one machine" in notes[0]
    assert "exists already" in notes[-1]


def test_a_dry_run_refuses_what_is_wrong_anywhere(laminar: Laminar) -> None:
    done = laminar("run", laminar.config(model={"path": "no-model"}), "--dry-run", deadline_s=DOOR_S)
    assert done.returncode == 2
    assert "no-model" in done.stderr


@pytest.mark.parametrize(
    ("ranks", "overrides", "names"),
    [
        (3, [], "5 ranks"),
        (5, ["control.mode=sinc"], "'stream' or 'partial'"),
        (5, ["model.path=no-model"], "no-model"),
    ],
)
def test_ranks_started_by_hand_refuse_once_and_together(
    laminar: Laminar, ranks: int, overrides: list[str], names: str
) -> None:
    options = [word for value in overrides for word in ("--set", value)]
    line = [find_mpiexec(), "--bind-to", "none", "--oversubscribe", "-n", str(ranks)]
    line += [sys.executable, "-m", "laminar_hpc.jobs.train", "--config", str(laminar.config()), *options]
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        timeout=4 * DOOR_S,
        cwd=laminar.directory,
        env=environment(os.environ),
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [text for text in done.stderr.splitlines() if text.startswith("laminar: ")]
    assert len(lines) == 1, done.stderr
    assert names in lines[0]
    assert "Traceback" not in done.stderr
    assert not laminar.run_dir.exists()
