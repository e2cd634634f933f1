"""What is seen at the door: packages that are not installed, and what a mode or its engines do not do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from laminar_hpc.config.load import check_config
from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.runtime.check import check_parts
from laminar_hpc.settings import check_control


def config(directory: Path, **sections: dict[str, object]) -> Config:
    return check_config({"run_dir": str(directory / "run"), "model": {"path": str(directory)}, **sections}, "a test")


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """None in sys.modules is Python's own mark of a module that is not to be found."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize("missing", [["megatron", "megatron.core"], ["megatron.core"]])
def test_a_trainer_without_its_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: list[str]
) -> None:
    hide(monkeypatch, *missing)
    with pytest.raises(ConfigError, match=r"trainer\.engine: megatron-core is not installed"):
        check_parts(config(tmp_path, trainer={"engine": "megatron"}))


def test_a_transport_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "nixl_cu12", "nixl_cu13", "nixl_rocm")
    with pytest.raises(ConfigError, match=r"weights\.transport: NIXL is not installed"):
        check_parts(config(tmp_path, weights={"transport": "nixl"}))


def test_what_is_not_chosen_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "megatron", "nixl_cu12", "nixl_cu13", "nixl_rocm")
    with pytest.raises(ConfigError, match=r"model\.path"):  # the empty directory, which is looked at next
        check_parts(config(tmp_path, trainer={"engine": "torch"}, rollout={"engine": "torch"}))


PACED = {"rollout": {"engine": "paced"}, "trainer": {"engine": "paced"}, "task": {"name": "synthetic"}}


@pytest.mark.parametrize(
    ("control", "sections", "message"),
    [
        (
            {"mode": "one_step", "sampler": "freshest"},
            {},
            "control.sampler must be 'fifo' in mode one_step, .*got 'freshest'",
        ),
        ({"mode": "sync", "sampler": "weighted"}, {}, "control.sampler must be 'fifo' in mode sync, .*got 'weighted'"),
        ({"mode": "laminar", "colocated": True}, PACED, "control.colocated must be false in mode laminar"),
        ({"mode": "one_step", "colocated": True}, PACED, "control.colocated must be false in mode one_step"),
        ({"mode": "partial", "capacity": 64}, {}, "control.capacity must be 0 where steps wait .*mode partial"),
        ({"mode": "laminar", "eviction": "wait", "capacity": 64}, {}, "control.capacity must be 0 .*eviction 'wait'"),
        (
            {"mode": "laminar"},
            {"rollout": {"engine": "paced"}, "paced": {"tokens": "model", "lengths": "32b-math"}},
            "repack.enabled must be false",
        ),
        ({"mode": "sync", "colocated": True}, {}, "control.colocated needs paced rollouts and trainers"),
    ],
)
def test_what_a_mode_does_not_do_is_refused(tmp_path: Path, control, sections, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_control(config(tmp_path, control=control, **sections))


@pytest.mark.parametrize(
    ("control", "sections"),
    [
        ({"mode": "laminar", "sampler": "weighted"}, {}),
        ({"mode": "partial", "sampler": "freshest"}, {}),
        ({"mode": "sync", "colocated": True}, PACED),
    ],
)
def test_what_a_mode_does_is_let_in(tmp_path: Path, control, sections) -> None:
    check_control(config(tmp_path, control=control, **sections))
