"""What a file says about where it comes from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import h5py
import pytest

from laminar_hpc.config.load import check_config
from laminar_hpc.record.provenance import UNKNOWN, gather, git_commit


def git(directory: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    result = subprocess.run(["git", *names, *arguments], cwd=directory, check=True, capture_output=True, text=True)
    return result.stdout.strip()


def test_the_commit_is_the_one_git_names(tmp_path: Path) -> None:
    assert git_commit(str(tmp_path)) == UNKNOWN
    first = tmp_path / "first"
    first.mkdir()
    git(first, "init", "-q")
    assert git_commit(str(first)) == UNKNOWN
    git(first, "commit", "-q", "--allow-empty", "-m", "one")
    commit = git(first, "rev-parse", "HEAD")
    assert git_commit(str(first)) == commit
    git(first, "pack-refs", "--all")
    assert git_commit(str(first)) == commit
    git(first, "worktree", "add", "-q", str(tmp_path / "second"), "-b", "other")
    assert git_commit(str(tmp_path / "second")) == commit
    git(tmp_path / "second", "commit", "-q", "--allow-empty", "-m", "two")
    second = git(tmp_path / "second", "rev-parse", "HEAD")
    assert second != commit
    assert git_commit(str(tmp_path / "second")) == second
    git(first, "checkout", "-q", "--detach")
    assert git_commit(str(first)) == commit


def test_metadata_have_config_mode_and_versions(tmp_path: Path) -> None:
    config = check_config({"run_dir": str(tmp_path), "model": {"path": "m"}, "control": {"mode": "sync"}}, "test")
    metadata = gather(config, '{"seed": 3}', 12.5)
    assert json.loads(metadata["config"]) == config.model_dump(mode="json")
    assert json.loads(metadata["mode"])["name"] == "sync"
    assert json.loads(metadata["packages"])["h5py"] == h5py.__version__
    assert metadata["controller_settings"] == '{"seed": 3}'
    assert float(metadata["clock_zero_unix_s"]) == 12.5
    assert metadata["host"]


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        ({"mode": "sync"}, "0"),
        ({"mode": "laminar", "max_staleness": 3}, "null"),
        ({"mode": "laminar", "eviction": "stale", "max_staleness": 3}, "3"),
        ({"mode": "sync", "eviction": "stale", "max_staleness": 3}, "0"),
    ],
)
def test_metadata_have_the_staleness_bound_of_mode_and_eviction(tmp_path: Path, control: dict, expected: str) -> None:
    config = check_config({"run_dir": str(tmp_path), "model": {"path": "m"}, "control": control}, "test")
    assert gather(config, "{}", 0.0)["staleness_bound"] == expected
