"""The manager's part of checkpoints: the controller's books, the payload, and the name that makes a checkpoint count.

    RUN_DIR/checkpoints/step-00000012.attempt-0.3.part/   while the parts of checkpoint 3 of the attempt are written
        trainer-0.safetensors ...                         each trainer's own (trainer/checkpoint.py)
        books.msgpack                                     control.snapshot.Snapshot
        payload.msgpack                                   for each trajectory that goes on: its length in bytes, its blocks
        manifest.json                                     step, attempt, and the length of every file
    RUN_DIR/checkpoints/step-00000012.attempt-0/          complete

Everything is written by one thread, in order; a rename puts a checkpoint into place when all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from laminar_hpc.control.snapshot import Snapshot
from laminar_hpc.errors import ConfigError
from laminar_hpc.process.disk import sync_directory
from laminar_hpc.protocol.events import Committed, SnapshotWritten
from laminar_hpc.protocol.trajectory import Block

FORMAT = "laminar checkpoint 1"
"""Its last word is the version. 1: the first."""

BOOKS, PAYLOAD, MANIFEST = "books.msgpack", "payload.msgpack", "manifest.json"
LENGTH_BYTES = 8
_NAME = re.compile(r"step-(\d{8,})\.attempt-(\d+)")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself; `clock_zero_unix_s` is the Unix time of 0 in its attempt's clock."""

    format: str
    step: int
    attempt: int
    clock_zero_unix_s: float
    files: dict[str, int]


class Saved(NamedTuple):
    """A complete checkpoint."""

    directory: str
    manifest: Manifest


class CheckpointKeeper:
    """Writes the manager's parts, and keeps the newest `keep` checkpoints under `root`."""

    def __init__(self, root: str, attempt: int, keep: int, clock_zero_unix_s: float, trainers: int) -> None:
        """A checkpoint of this `attempt` has a part of each of `trainers` trainers."""
        self._trainers = trainers
        self._root = root
        self._attempt = attempt
        self._keep = keep
        self._clock_zero_unix_s = clock_zero_unix_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: list[Future[SnapshotWritten | Committed | None]] = []

    def directory(self, step: int, serial: int) -> str:
        """Where the parts of checkpoint `serial`, of `step`, are written."""
        return f"{self.place(step)}.{serial}.part"

    def place(self, step: int) -> str:
        """Where this attempt's checkpoint of `step` is when it is complete."""
        return os.path.join(self._root, f"step-{step:08d}.attempt-{self._attempt}")

    def write(self, step: int, serial: int, books: bytes, payload: list[list[Block]]) -> None:
        """Write the manager's parts of checkpoint `serial`, of `step`; `poll` tells when."""
        begun_s = time.monotonic()

        def work() -> SnapshotWritten:
            try:
                nbytes = self._write(self.directory(step, serial), books, payload)
            except OSError as error:
                return SnapshotWritten(step, serial, time.monotonic() - begun_s, 0, _why(error))
            return SnapshotWritten(step, serial, time.monotonic() - begun_s, nbytes)

        self._submit(work)

    def commit(self, step: int, serial: int) -> None:
        """All parts are there: put the checkpoint into place, and remove the oldest ones; `poll` tells when."""

        def work() -> Committed:
            try:
                self._commit(step, self.directory(step, serial))
            except OSError as error:
                return Committed(step, serial, _why(error))
            self._prune()
            return Committed(step, serial)

        self._submit(work)

    def abandon(self, step: int, serial: int) -> None:
        """Remove what there is of a checkpoint that cannot be completed."""

        def work() -> None:
            shutil.rmtree(self.directory(step, serial), ignore_errors=True)

        self._submit(work)

    def poll(self) -> list[SnapshotWritten | Committed]:
        """What has been done since the last call."""
        events = []
        while self._under_way and self._under_way[0].done():
            event = self._under_way.pop(0).result()
            if event is not None:
                events.append(event)
        return events

    def close(self) -> None:
        """Wait for the end of all that was asked for."""
        self._thread.shutdown(wait=True)

    def _submit(self, work: Callable[[], SnapshotWritten | Committed | None]) -> None:
        self._under_way.append(self._thread.submit(work))

    def _write(self, directory: str, books: bytes, payload: list[list[Block]]) -> int:
        os.makedirs(directory, exist_ok=True)
        encoder = msgspec.msgpack.Encoder()
        nbytes = _write_file(os.path.join(directory, BOOKS), iter([books]))
        frames = (part for blocks in payload for part in _frame(encoder.encode(blocks)))
        return nbytes + _write_file(os.path.join(directory, PAYLOAD), frames)

    def _commit(self, step: int, directory: str) -> None:
        files = {entry.name: entry.stat().st_size for entry in os.scandir(directory)}
        if not {BOOKS, PAYLOAD} <= files.keys() or len(files) < 2 + self._trainers:
            raise FileNotFoundError(errno.ENOENT, "a part is missing", directory)
        manifest = Manifest(
            format=FORMAT,
            step=step,
            attempt=self._attempt,
            clock_zero_unix_s=self._clock_zero_unix_s,
            files=files,
        )
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        _write_file(os.path.join(directory, MANIFEST), iter([text]))
        sync_directory(directory)
        os.rename(directory, self.place(step))
        sync_directory(self._root)

    def _prune(self) -> None:
        """Complete ones beyond the newest, and parts that are not completed any more: this is called with none under way."""
        for path in _complete(self._root)[self._keep :]:
            part = f"{path}.part"
            with contextlib.suppress(OSError):
                os.rename(path, part)  # so that one that is half removed is none
            shutil.rmtree(part, ignore_errors=True)
        for entry in os.scandir(self._root):
            if entry.name.endswith(".part"):
                shutil.rmtree(entry.path, ignore_errors=True)


def newest_checkpoint(root: str) -> tuple[Saved | None, list[str]]:
    """The newest complete checkpoint under `root` (None: there is none), and what is wrong with those that are newer.

    ConfigError where there are some, but none that can be used.
    """
    wrong: list[str] = []
    for path in _complete(root) if os.path.isdir(root) else []:
        try:
            return Saved(path, _check(path)), wrong
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError(f"no checkpoint can be used: {'; '.join(wrong)}")
    return None, []


def open_checkpoint(directory: str) -> Saved:
    """The complete checkpoint in `directory`. ConfigError where there is none."""
    return Saved(directory, _check(directory))


def read_books(saved: Saved) -> tuple[bytes, Snapshot]:
    """The controller's books, as they were written, and decoded. ConfigError where they cannot be read."""
    path = os.path.join(saved.directory, BOOKS)
    try:
        with open(path, "rb") as file:
            data = file.read()
        return data, msgspec.msgpack.decode(data, type=Snapshot)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: does not have a controller's books: {error}") from error


def read_payload(saved: Saved) -> Iterator[list[Block]]:
    """The blocks of one trajectory after the other. ConfigError where they cannot be read."""
    path = os.path.join(saved.directory, PAYLOAD)
    decoder = msgspec.msgpack.Decoder(list[Block])
    try:
        with open(path, "rb") as file:
            while prefix := file.read(LENGTH_BYTES):
                length = int.from_bytes(prefix, "little")
                data = file.read(length)
                if len(prefix) < LENGTH_BYTES or len(data) < length:
                    raise ConfigError(f"{path}: ends in the middle of a trajectory")
                yield decoder.decode(data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: does not have the blocks of trajectories: {error}") from error


def relabelled(block: Block, same_weights: set[int], version: int) -> Block:
    """The block as the next attempt has it, which publishes the checkpoint's weights again as `version`."""
    return msgspec.structs.replace(block, version=version) if block.version in same_weights else block


def _complete(root: str) -> list[str]:
    """The directories of complete checkpoints, newest first: the last attempt's, wherever the one before had come to."""
    found = []
    for entry in os.scandir(root):
        if (match := _NAME.fullmatch(entry.name)) and entry.is_dir():
            found.append((int(match[2]), int(match[1]), entry.path))
    return [path for _, _, path in sorted(found, reverse=True)]


def _check(directory: str) -> Manifest:
    path = os.path.join(directory, MANIFEST)
    try:
        with open(path, "rb") as file:
            manifest = msgspec.json.decode(file.read(), type=Manifest)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: is no checkpoint's manifest: {error}") from error
    if manifest.format != FORMAT:
        raise ConfigError(f"{path}: its format must be {FORMAT!r}, it is {manifest.format!r}")
    for name, nbytes in manifest.files.items():
        part = os.path.join(directory, name)
        if os.path.basename(name) != name or not os.path.isfile(part):
            raise ConfigError(f"{part}: is missing")
        if os.path.getsize(part) != nbytes:
            raise ConfigError(f"{part}: must have {nbytes} bytes, has {os.path.getsize(part)}")
    return manifest


def _frame(data: bytes) -> tuple[bytes, bytes]:
    return len(data).to_bytes(LENGTH_BYTES, "little"), data


def _write_file(path: str, parts: Iterator[bytes]) -> int:
    """Write a file and wait until it is on the disk; its length."""
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _why(error: OSError) -> str:
    return f"{error.filename or 'a file'}: {error.strerror}"
