"""`laminar compare`: its plan of runs, what it refuses at the door, and a whole comparison in simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laminar_hpc.cli import main
from laminar_hpc.config.load import load_config, load_modes
from laminar_hpc.errors import ConfigError, EngineError
from laminar_hpc.launch import compare
from laminar_hpc.launch.compare import check_turns, plan, run_turns
from laminar_hpc.policy.modes import MODES
from laminar_hpc.record.paths import read_config
from laminar_hpc.record.status import Status, read_status, write_status

TINY = """
run_dir = "runs/tiny"
[job]
rollouts = 2
seed = 5
[task]
name = "synthetic"
parameters = { min_tokens = 8, max_tokens = 16 }
[rollout]
engine = "paced"
concurrency = 8
max_prompt_tokens = 16
max_response_tokens = 16384
stream_interval_s = 5.0
[trainer]
engine = "paced"
[batch]
prompts = 4
group_size = 2
[control]
steps = 2
[evaluation]
every = 0
[compare.sync.job]
rollouts = 3
[compare.sync.control]
colocated = true
[compare.sync.paced]
train_token_s = 7e-6
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The path of a config of emulated GPUs, in which sync has GPUs of its own."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def loaded(config: str, directory: Path, *overrides: str, modes: tuple[str, ...] = ("sync", "laminar")) -> Any:
    return load_modes(config, list(modes), list(overrides), str(directory))


def test_each_seed_has_all_modes_in_turn_and_the_halves_come_last(config: str, tmp_path: Path) -> None:
    turns = plan(loaded(config, tmp_path / "out"), [1, 0, 1], bound=True)
    assert [turn.name for turn in turns] == [
        "sync-seed1",
        "laminar-seed1",
        "sync-seed0",
        "laminar-seed0",
        "alone-generation-seed1",
        "alone-training-seed1",
    ]
    assert [turn.config.job.seed for turn in turns] == [1, 1, 0, 0, 1, 1]
    assert [turn.config.run_dir for turn in turns[:2]] == [str(tmp_path / "out" / turn.name) for turn in turns[:2]]
    generation, training = (turn.config for turn in turns[-2:])
    assert generation.job.rollouts == training.job.rollouts == 2  # laminar's
    assert (generation.paced.train_token_s, generation.paced.publish_s, generation.paced.decode) == (0.0, 0.0, [])
    assert (training.paced.train_token_s, training.paced.step_overhead_s) == (None, 0.0)
    assert [turn.name for turn in plan(loaded(config, tmp_path), None, bound=False)] == ["sync-seed5", "laminar-seed5"]


def test_the_halves_have_what_the_last_mode_has_where_the_default_one_is_not_there(config: str, tmp_path: Path) -> None:
    turns = plan(loaded(config, tmp_path, modes=("stream", "sync")), None, bound=True)
    assert [turn.config.job.rollouts for turn in turns] == [2, 3, 3, 3]
    assert not any(turn.config.control.colocated for turn in turns[2:])


def test_a_mode_has_its_own_values_and_the_command_line_goes_over_them(config: str, tmp_path: Path) -> None:
    sync, laminar = loaded(config, tmp_path, "control.steps=3", "paced.train_token_s=1e-6").values()
    assert (sync.control.mode, sync.control.colocated, sync.job.rollouts) == ("sync", True, 3)
    assert (laminar.control.mode, laminar.control.colocated, laminar.job.rollouts) == ("laminar", False, 2)
    assert [one.control.steps for one in (sync, laminar)] == [3, 3]
    assert [one.paced.train_token_s for one in (sync, laminar)] == [1e-6, 1e-6]
    assert [one.compare for one in (sync, laminar)] == [{}, {}]
    assert load_config(config).job.rollouts == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--modes", "sink"], "mode sink: control.mode: input should be 'laminar', 'sync'"),
        (["--modes", ""], "control.mode: input should be"),
        (["--seeds", "-1"], "job.seed: input should be greater than or equal to 0"),
        (["--set", "compare.sink.job.rollouts=2"], "compare.sink.[key]: input should be 'laminar', 'sync'"),
        (["--set", "compare.sync.job.rolouts=2"], "mode sync: unknown key job.rolouts; did you mean rollouts?"),
        (["--set", "compare.laminar.control.colocated=true"], "control.colocated must be false in mode laminar"),
        (["--set", "compare.sync.rollout.engine=torch"], "mode sync: trainer.engine = 'paced' needs"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["compare", config, str(tmp_path / "out"), "--simulate", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_comparison_goes_on_where_it_was_interrupted(config: str, tmp_path: Path) -> None:
    turns = plan(loaded(config, tmp_path / "out"), [0, 1], bound=False)
    assert check_turns(turns, simulated=True) == set()
    assert run_turns(turns[:2], set(), simulated=True).failures == {}
    broken = Path(turns[1].config.run_dir)
    status = read_status(str(broken))
    assert status is not None
    status.state = "failed"
    write_status(str(broken), status)
    (broken / "left").touch()
    assert check_turns(turns, simulated=True) == {"sync-seed0"}
    assert run_turns(turns, {"sync-seed0"}, simulated=True).failures == {}
    assert not (broken / "left").exists()
    assert check_turns(turns, simulated=True) == {turn.name for turn in turns}


def test_a_run_of_another_kind_is_left_alone(config: str, tmp_path: Path) -> None:
    turns = plan(loaded(config, tmp_path / "out", modes=("laminar",)), [0], bound=False)
    run_turns(turns, set(), simulated=True)
    run_dir = turns[0].config.run_dir
    other = plan(loaded(config, tmp_path / "out", "control.steps=3", modes=("laminar",)), [0], bound=False)
    with pytest.raises(ConfigError, match=rf"{run_dir}: .* control.steps is 2 there, 3 here"):
        check_turns(other, simulated=True)
    with pytest.raises(ConfigError, match="holds a simulated run"):
        check_turns(turns, simulated=False)
    status = Status.blank()
    write_status(run_dir, status)
    with pytest.raises(ConfigError, match="the run is going on"):
        check_turns(turns, simulated=True)
    assert read_config(run_dir) == turns[0].config


def test_a_directory_that_is_no_run_is_left_alone(config: str, tmp_path: Path) -> None:
    turns = plan(loaded(config, tmp_path / "out", modes=("laminar",)), [0], bound=False)
    Path(turns[0].config.run_dir).mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        check_turns(turns, simulated=True)


def test_a_run_that_fails_does_not_keep_the_others(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate = compare.simulate

    def fails_in_sync(config: Any, say: Any) -> Any:
        if config.job.rollouts == 3:
            raise EngineError("the simulated job stands still")
        return simulate(config, say)

    monkeypatch.setattr(compare, "simulate", fails_in_sync)
    arguments = ["compare", config, str(tmp_path / "out"), "--simulate", "--modes", "sync,laminar", "--no-bound"]
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert "warning: sync, seed 5, failed: the simulated job stands still" in printed
    assert "laminar" in (tmp_path / "out" / "compare.html").read_text(encoding="utf-8")


def test_a_comparison_that_is_stopped_ends_there(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = plan(loaded(config, tmp_path / "out"), [0], bound=False)
    codes = iter([1, 130])

    def ends(config: Any, _allocation: object) -> int:
        Path(config.run_dir).mkdir(parents=True)
        status = Status.blank()
        status.state, status.reason = "stalled", "nobody moves"
        write_status(config.run_dir, status)
        return next(codes)

    monkeypatch.setattr(compare, "run", ends)
    outcome = run_turns(turns, set(), simulated=False)
    assert outcome.failures == {"sync-seed0": "stalled: nobody moves"}
    assert outcome.stopped == 130


def test_all_modes_are_compared_in_simulation(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", config, str(tmp_path / "out"), "--simulate", "--seeds", "0,1"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    rows = [line.split()[0] for line in printed.splitlines() if line.split() and line.split()[0] in MODES]
    assert rows == [*MODES, *MODES]
    assert "of the bound" in printed
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"throughput.png", "staleness.png"}
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("has finished already") == 12
