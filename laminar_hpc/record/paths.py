"""Where a run keeps its files."""

from __future__ import annotations

import json
import os
import shutil

from laminar_hpc.config.load import check_config
from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.record.schema import attempt_of, file_name


class RunPaths:
    """The files under a run directory."""

    def __init__(self, run_dir: str) -> None:
        self.root = run_dir

    @property
    def config(self) -> str:
        """The resolved config, as JSON."""
        return os.path.join(self.root, "config.json")

    @property
    def records(self) -> str:
        """The folder of HDF5 files, one for each rank and attempt."""
        return os.path.join(self.root, "records")

    @property
    def logs(self) -> str:
        """The folder of what ranks and workers print."""
        return os.path.join(self.root, "logs")

    @property
    def checkpoints(self) -> str:
        """The folder of checkpoints (runtime/checkpoint.py)."""
        return os.path.join(self.root, "checkpoints")

    def next_attempt(self) -> int:
        """The number of the next start of this run, 0 for the first: one more than the last that has left a record.

        ConfigError where the folder of records cannot be read.
        """
        try:
            attempts = [attempt_of(name) for name in os.listdir(self.records)]
        except OSError as error:
            raise ConfigError(f"{self.records}: cannot be read: {error.strerror}") from error
        return max((attempt for attempt in attempts if attempt is not None), default=-1) + 1

    def record(self, attempt: int, rank: int, role: str) -> str:
        """A rank's record file."""
        return os.path.join(self.records, file_name(role, rank, attempt))

    def log(self, rank: int, name: str) -> str:
        """A rank's or worker's log."""
        return os.path.join(self.logs, f"rank-{rank:05d}.{name}.log")


def check_new_run_dir(run_dir: str) -> None:
    """ConfigError where the run directory exists, or where its nearest existing parent is no directory to write to."""
    if os.path.lexists(run_dir):
        raise ConfigError(f"run_dir: {run_dir} exists already; it must be a new directory")
    parent = os.path.dirname(run_dir)
    while parent != os.path.dirname(parent) and not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        raise ConfigError(f"run_dir: {run_dir} cannot be made: {parent} is not a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"run_dir: {run_dir} cannot be made: {parent} is not writable")


def create_run_dir(config: Config) -> RunPaths:
    """Make the run directory with the resolved config in it; ConfigError where it exists or cannot be made.

    The directory appears whole or not at all.
    """
    check_new_run_dir(config.run_dir)
    parent = os.path.dirname(config.run_dir)
    scratch = f"{config.run_dir}.{os.getpid()}.new"
    try:
        os.makedirs(parent, exist_ok=True)
        os.mkdir(scratch)
        try:
            for folder in ("records", "logs"):
                os.mkdir(os.path.join(scratch, folder))
            with open(os.path.join(scratch, "config.json"), "w", encoding="utf-8") as file:
                file.write(config.model_dump_json(indent=2))
            os.rename(scratch, config.run_dir)
        except OSError:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(f"run_dir: {config.run_dir} cannot be made: {error.strerror}") from error
    return RunPaths(config.run_dir)


def read_config(run_dir: str) -> Config:
    """The resolved config of a run directory; ConfigError where it is missing or broken."""
    path = RunPaths(run_dir).config
    try:
        with open(path, encoding="utf-8") as file:
            return check_config(json.load(file), path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
