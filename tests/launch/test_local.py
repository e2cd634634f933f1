"""How `laminar run` starts a job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from laminar_hpc.config.schema import Config
from laminar_hpc.launch import local
from laminar_hpc.record.status import Status, write_status


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_an_mpiexec_that_cannot_start_itself_is_started_once_more(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that does runs a job that finishes at once."""
    config = Config(run_dir=str(tmp_path / "run"), model={"path": "model"}, checkpoint={"on_stop": False})
    started = []

    def program(_config: Config, *_: object) -> list[str]:
        started.append(len(started))
        if len(started) <= failures:
            return [sys.executable, "-c", f"raise SystemExit({local.LAUNCHER_FAILED})"]
        status = Status.blank()
        status.state, status.reason = "finished", "all steps are trained"
        write_status(config.run_dir, status)
        return [sys.executable, "-c", ""]

    monkeypatch.setattr(local, "command_line", program)
    assert local.run(config) == (1 if failures == 2 else 0)
    assert len(started) == min(failures, 1) + 1
    assert capsys.readouterr().out.count("trying once more") == min(failures, 1)
