"""The record of a simulated job: complete, the same every time, and one that the checks hold of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from simulated_jobs import lengths_file, simulated, small_config, tail_config

from laminar_hpc.analysis.checks import Result, run_checks
from laminar_hpc.cli import main
from laminar_hpc.config.schema import Config
from laminar_hpc.control.controller import Controller, Settings
from laminar_hpc.errors import ConfigError
from laminar_hpc.policy.modes import MODES
from laminar_hpc.protocol.commands import Generate, HandOver
from laminar_hpc.protocol.wire import decode
from laminar_hpc.record import schema
from laminar_hpc.record.reader import Run
from laminar_hpc.sim.run import simulate


def logged(run: Run) -> list[tuple[float, bytes]]:
    return [(one.time_s, one.data) for stream in (run.events(), run.commands()) for one in stream]


def tables_of(run: Run) -> dict[str, Any]:
    return {name: run.table(name).tobytes() for name in schema.TABLES if not name.startswith("bench_")}


def holds(run: Run) -> None:
    """Every check, and a ledger with nothing open."""
    for check in run_checks(run):
        assert check.result is not Result.VIOLATED, check
    assert len(run.table("hand_outs")) == len(run.table("groups"))
    trained = run.table("trajectories")
    trained = trained[trained["state"] == schema.TABLES["trajectories"].code("state", "consumed")]
    assert len(trained) == run.table("steps")["samples"].sum()
    generated = int(run.table("engine")["generated_tokens"].sum())
    assert generated == int(run.table("trajectories")["response_tokens"].sum())


def test_the_same_config_and_seed_give_the_same_record(tmp_path: Path) -> None:
    first, second = (simulated(tail_config(tmp_path / name)) for name in ("a", "b"))
    assert logged(first) == logged(second)
    assert tables_of(first) == tables_of(second)
    other = simulated(tail_config(tmp_path / "c", job={"rollouts": 4, "relays": 2, "seed": 1}))
    assert tables_of(other)["trajectories"] != tables_of(first)["trajectories"]


@pytest.mark.parametrize("reverse_ties", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_checks_hold_whichever_way_ties_go(tmp_path: Path, mode: str, reverse_ties: bool) -> None:
    run = simulated(tail_config(tmp_path / "run", control={"mode": mode}), reverse_ties=reverse_ties)
    holds(run)
    moved = (run.table("moves")["ending"] == b"moved").sum()
    assert (moved > 0) == (mode == "laminar")
    staleness = run.table("trajectories")["staleness_consumption"]
    assert (staleness.max() > 0) == (mode != "sync")


def test_ties_that_are_reversed_change_a_run_of_equal_responses(tmp_path: Path) -> None:
    """Four rollouts that finish at the same moments: there are ties, and who comes first decides who gets what."""
    lengths = lengths_file(tmp_path, 10, 10)
    sections: dict[str, dict[str, Any]] = {
        "job": {"rollouts": 4},
        "batch": {"prompts": 8},
        "control": {"steps": 3, "ahead": 1.0},
    }
    kept = simulated(small_config(tmp_path / "kept", lengths, **sections))
    reversed_ = simulated(small_config(tmp_path / "reversed", lengths, **sections), reverse_ties=True)
    holds(kept)
    holds(reversed_)
    assert logged(kept) != logged(reversed_)
    for table, column in (("steps", "response_tokens"), ("steps", "samples"), ("publications", "step")):
        assert kept.table(table)[column].tolist() == reversed_.table(table)[column].tolist()


def test_the_recorded_events_give_a_fresh_controller_the_same_commands(tmp_path: Path) -> None:
    run = simulated(tail_config(tmp_path / "run"))
    controller = Controller(msgspec.convert(run.setting("controller_settings"), Settings))
    again = [
        (event.time_s, command)
        for event in run.events()
        for command in controller.handle(decode(event.data), event.time_s)
    ]
    assert again == [(one.time_s, decode(one.data)) for one in run.commands()]


def test_what_was_moved_goes_on_where_it_was(tmp_path: Path) -> None:
    """Per trajectory, no token is generated twice: an order begins where the hand-over before it has ended."""
    run = simulated(tail_config(tmp_path / "run"))
    commands = [decode(one.data) for one in run.commands()]
    moved = {id for command in commands if isinstance(command, HandOver) for id in command.trajectories}
    resumed = {
        spec.id: spec.resume_tokens
        for command in commands
        if isinstance(command, Generate)
        for spec in command.trajectories
        if spec.resume_tokens
    }
    assert resumed
    assert set(resumed) <= moved
    lengths = dict(
        zip(run.table("trajectories")["trajectory"], run.table("trajectories")["response_tokens"], strict=True)
    )
    assert all(tokens < lengths[id] for id, tokens in resumed.items())


def test_time_is_accounted_for(tmp_path: Path) -> None:
    run = simulated(tail_config(tmp_path / "run"))
    phases = run.table("phases")
    assert run.status is not None
    assert run.status.state == "finished"
    ended_s = phases["time_s"].max()
    for rank in np.unique(phases["rank"]):
        assert phases[phases["rank"] == rank]["seconds"].sum() == pytest.approx(ended_s)


def test_what_cannot_be_simulated_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config.model_validate({"run_dir": str(tmp_path / "run"), "model": {"path": "models/tiny"}})
    with pytest.raises(ConfigError, match=r"rollout\.engine: only emulated GPUs can be simulated"):
        simulate(config, print)
    assert not (tmp_path / "run").exists()
    path = tmp_path / "config.toml"
    path.write_text('run_dir = "run"\n[model]\npath = "models/tiny"\n')
    assert main(["simulate", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_writes_the_record_that_the_report_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib.resources import files

    config = str(files("laminar_hpc.jobs") / "configs" / "paced-32b.toml")
    small = ["batch.prompts=4", "batch.minibatches=2", "control.steps=2", "job.rollouts=2", "rollout.concurrency=32"]
    options = [word for value in (*small, f"run_dir={tmp_path}/run") for word in ("--set", value)]
    assert main(["simulate", config, *options]) == 0
    printed = capsys.readouterr().out
    assert "step 2/2" in printed
    assert "finished: all 2 steps are trained" in printed
    assert main(["report", f"{tmp_path}/run"]) == 0
    assert "violated" not in capsys.readouterr().out


def test_a_smaller_share_of_delay_makes_less_of_repacking(tmp_path: Path) -> None:
    """Work per time while there are prompts, and how long trajectories take: without repacking, with a limit, without one."""
    found = []
    for name, repack in (("off", {"enabled": False}), ("limited", {"delay_share": 0.1}), ("all", {"delay_share": 0.0})):
        run = simulated(tail_config(tmp_path / name, repack=repack))
        rows, until_s = run.table("engine"), run.table("hand_outs")["handed_out_s"].max()
        generated = rows[rows["time_s"] <= until_s]["generated_tokens"].sum() / until_s
        ended = run.table("trajectories")
        took_s = np.sort(ended["finished_s"] - ended["begun_s"])[-len(ended) // 10 :]
        found.append((float(generated), float(took_s.mean())))
    (off, off_s), (limited, limited_s), (unlimited, unlimited_s) = found
    assert off < limited < unlimited
    assert off_s < limited_s < 1.1 * off_s
    assert limited_s < unlimited_s
