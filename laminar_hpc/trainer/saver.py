"""Saves an engine's state beside its training: the copy at once, the file in a thread."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from laminar_hpc.protocol.peer import SaveState, StateSaved
from laminar_hpc.trainer.api import TrainerState, TrainingEngine
from laminar_hpc.trainer.checkpoint import Origin, state_path, write_state


class StateSaver:
    """One state at a time: asked for another while one is being written it says no, for a trainer never waits for a disk.

    Whatever goes wrong is the answer, one line; training goes on.
    """

    def __init__(self, engine: TrainingEngine, origin: Origin, answer: Callable[[StateSaved], None]) -> None:
        """`answer` is called from the thread, once for each request."""
        self._engine = engine
        self._origin = origin
        self._answer = answer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._writing: int | None = None
        """The step whose state is being written."""

    def save(self, message: SaveState) -> None:
        """Copy the state as it is now, and begin to write it."""
        if self._writing is not None:
            error = f"the state after step {self._writing} is still being written"
            self._answer(StateSaved(message.step, message.serial, 0.0, 0, error))
            return
        begun_s = time.monotonic()
        state = self._engine.state()
        stall_s = time.monotonic() - begun_s
        self._writing = message.step
        self._thread.submit(self._write, message, state, begun_s, stall_s)

    def finish(self) -> None:
        """What has been begun is written, and answered."""
        self._thread.shutdown(wait=True)

    def _write(self, message: SaveState, state: TrainerState, begun_s: float, stall_s: float) -> None:
        nbytes, error = 0, ""
        try:
            if state.wait is not None:
                state.wait()
            nbytes = write_state(message.directory, self._origin, message.step, state)
        except Exception as caught:
            traceback.print_exc()
            reason = (caught.strerror if isinstance(caught, OSError) else None) or repr(caught)
            error = f"{state_path(message.directory, int(self._origin.trainer))}: cannot be written: {reason}"
        self._writing = None  # before the answer, since who hears it may ask for the next one
        seconds = time.monotonic() - begun_s
        self._answer(StateSaved(message.step, message.serial, seconds, nbytes, error, stall_s))
