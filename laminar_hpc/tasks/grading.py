"""One request for prompt or grade: what a task's own code is called for, and what comes back whatever it raises."""

from __future__ import annotations

import math
import traceback

import numpy as np

from laminar_hpc.config.schema import Config
from laminar_hpc.protocol.peer import EncodePrompt, Grade, Graded, PromptEncoded
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.api import Task, TextTokens
from laminar_hpc.tasks.encoding import encode_prompt
from laminar_hpc.tasks.overlong import overlong_penalty

Request = EncodePrompt | Grade
Answer = PromptEncoded | Graded


class RequestHandler:
    """A task with the tokenizer of the model that it is for."""

    def __init__(self, config: Config, tokenizer: TextTokens, task: Task) -> None:
        self._tokenizer = tokenizer
        self._task = task
        self._max_prompt_tokens = config.rollout.max_prompt_tokens
        self._max_response_tokens = config.rollout.max_response_tokens
        self._overlong_tokens = config.task.overlong_tokens

    def answer(self, request: Request) -> Answer:
        """The answer to a request. Never raises: data sets and verifiers are foreign code and may raise anything."""
        try:
            return self._encoded(request) if isinstance(request, EncodePrompt) else self._graded(request)
        except BaseException as error:  # KeyboardInterrupt and SystemExit too
            traceback.print_exc()
            return no_answer(request, f"{type(error).__name__}: {error}")

    def _encoded(self, request: EncodePrompt) -> PromptEncoded:
        purpose = Purpose(request.purpose)
        tokens = encode_prompt(self._tokenizer, self._task, purpose, request.prompt, self._max_prompt_tokens)
        return PromptEncoded(request.trajectory, np.asarray(tokens, "<i4").tobytes())

    def _graded(self, request: Grade) -> Graded:
        """The task's reward, and for training what a response that is nearly too long is punished with."""
        purpose = Purpose(request.purpose)
        tokens = np.frombuffer(request.response, "<i4").tolist()
        score = float(self._task.grade(purpose, request.prompt, self._tokenizer.decode(tokens)))
        if not math.isfinite(score):
            raise ValueError(f"the reward is {score}")
        penalty = 0.0
        if purpose is Purpose.TRAIN:
            penalty = overlong_penalty(len(tokens), self._max_response_tokens, self._overlong_tokens)
        return Graded(request.trajectory, score + penalty, "", score=score if penalty else None)


def no_answer(request: Request, reason: str, late: bool = False) -> Answer:
    """The answer where there is no prompt or no reward; `late` where it was not there at the deadline."""
    line = " ".join(reason.split())[:300]
    if isinstance(request, EncodePrompt):
        return PromptEncoded(request.trajectory, b"", line)
    return Graded(request.trajectory, 0.0, line, late)
