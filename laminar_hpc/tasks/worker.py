"""The task worker: it builds the task, and has requests for prompts and grades answered by a child process, in order.

Data sets and verifiers are code that is not ours, fed with text that nobody has read. What they print goes to the worker's
log; what they raise goes into the answer; what they take of the memory ends at a limit; and where they do not come back,
or end their process, the child is lost, and nothing else. What they have started ends with the child or with the worker.
"""

from __future__ import annotations

import resource
import time

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ProtocolError
from laminar_hpc.process.channel import Channel, wait_any
from laminar_hpc.protocol.peer import EncodePrompt, Grade, Shutdown, StartTask, TaskUp
from laminar_hpc.tasks.api import Task
from laminar_hpc.tasks.build import build_task, build_tokenizer
from laminar_hpc.tasks.child import Child
from laminar_hpc.tasks.grading import RequestHandler
from laminar_hpc.tasks.guard import end_children, fork_guard

MEMORY_LIMIT_BYTES = 4 << 30
"""Address space of a task worker: what goes beyond it is a MemoryError inside the verifier, not a node out of memory."""


def main(channel: Channel) -> None:
    """Build the config's tokenizer and task, then serve until the driver ends it."""
    config = receive_start(channel)
    limit_memory(MEMORY_LIMIT_BYTES)
    serve(channel, config, build_task(config))


def receive_start(channel: Channel) -> Config:
    """Wait for the first message, which carries the config."""
    message = channel.receive(None)
    if not isinstance(message, StartTask):
        raise ProtocolError(f"task worker: the first message must be StartTask, got {type(message).__name__}")
    return Config.model_validate_json(message.config)


def limit_memory(limit_bytes: int) -> None:
    """Bound the address space of this process and of those it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def serve(channel: Channel, config: Config, task: Task) -> None:
    """Report the task as up, then answer requests in order, until the driver asks for the end or is gone."""
    handler = RequestHandler(config, build_tokenizer(config), task)
    worker = fork_guard()
    if worker is None:
        return
    try:
        channel.send(TaskUp(prompts=task.prompts, held_out=task.held_out))
        _answer(channel, worker, config, Child(handler.answer, [channel, worker]))
    finally:
        end_children()


def _answer(channel: Channel, worker: Channel, config: Config, child: Child) -> None:
    """The guard's loop. How far ahead requests come is the driver's business; all go on to the child at once."""
    while worker not in wait_any([channel, worker, *child.channels()], child.left_s(time.monotonic())):
        while (message := channel.receive()) is not None:
            if isinstance(message, EncodePrompt):
                child.ask(message, config.task.prompt_deadline_s)
            elif isinstance(message, Grade):
                child.ask(message, config.task.deadline_s)
            elif isinstance(message, Shutdown):
                return
            else:
                raise ProtocolError(f"task worker: cannot answer {type(message).__name__}")
        for answer in child.poll():
            channel.send(answer)
