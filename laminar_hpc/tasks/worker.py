"""The task worker: the process in which prompts are made and responses graded, since both run code that is not ours.

It answers its driver's requests one by one, in order. What a verifier prints goes to the worker's log; what it raises
goes into the answer; what it does to the memory ends at a limit; and when it does not come back, the driver kills it.
"""

from __future__ import annotations

import math
import resource
import traceback

import numpy as np

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ProtocolError
from laminar_hpc.process.channel import Channel
from laminar_hpc.protocol.peer import EncodePrompt, Grade, Graded, PromptEncoded, Shutdown, StartTask, TaskUp
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.api import Task
from laminar_hpc.tasks.build import build_task
from laminar_hpc.tasks.tokenizer import Tokenizer, encode_prompt

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
    """Report the task as up, then answer requests in order. ConfigError where a prompt is too long."""
    tokenizer = Tokenizer(config.model.path)
    channel.send(TaskUp(prompts=task.prompts, held_out=task.held_out))
    while True:
        message = channel.receive(None)
        if isinstance(message, EncodePrompt):
            channel.send(_encoded(tokenizer, task, message, config.rollout.max_prompt_tokens))
        elif isinstance(message, Grade):
            channel.send(_graded(tokenizer, task, message))
        elif isinstance(message, Shutdown):
            return
        else:
            raise ProtocolError(f"task worker: cannot answer {type(message).__name__}")


def _encoded(tokenizer: Tokenizer, task: Task, message: EncodePrompt, max_tokens: int) -> PromptEncoded:
    try:
        tokens = encode_prompt(tokenizer, task, Purpose(message.purpose), message.prompt, max_tokens)
    except (Exception, SystemExit) as error:  # a data set is foreign code and may raise anything
        traceback.print_exc()
        return PromptEncoded(message.trajectory, b"", _one_line(error))
    return PromptEncoded(message.trajectory, np.asarray(tokens, "<i4").tobytes())


def _graded(tokenizer: Tokenizer, task: Task, message: Grade) -> Graded:
    try:
        response = tokenizer.decode(np.frombuffer(message.response, "<i4").tolist())
        reward = float(task.grade(Purpose(message.purpose), message.prompt, response))
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}")
    except (Exception, SystemExit) as error:  # a verifier is foreign code and may raise anything
        traceback.print_exc()
        return Graded(message.trajectory, 0.0, _one_line(error))
    return Graded(message.trajectory, reward, "")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
