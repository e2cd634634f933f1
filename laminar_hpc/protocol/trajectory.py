"""A trajectory: one response to one prompt, as the control plane and the payload plane each see it.

The control plane sees `TrajectorySpec` (what a rollout needs to begin) and `Segment` (how many tokens, from where, under
which weights). The payload plane sees `Block`, a run of tokens of one segment; the blocks of a trajectory in the order of
their offsets are its tokens, prompt first.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Purpose(str, Enum):
    """Why a trajectory is generated."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class Source(str, Enum):
    """Where the tokens of a segment come from. Only the model's own tokens are trained on."""

    PROMPT = "prompt"
    MODEL = "model"
    TOOL = "tool"


class State(str, Enum):
    """Where a trajectory is in its life.

    WAITING (has no owner yet, or lost it) -> GENERATING <-> AT_TOOL -> FINISHED -> CONSUMED;
    DISCARDED and RETURNED end it from any state before CONSUMED.
    """

    WAITING = "waiting"
    GENERATING = "generating"
    AT_TOOL = "at_tool"
    FINISHED = "finished"
    CONSUMED = "consumed"
    DISCARDED = "discarded"
    RETURNED = "returned"


class Stop(str, Enum):
    """Why generation of a trajectory ended."""

    END_TOKEN = "end_token"
    LENGTH = "length"


class Verdict(str, Enum):
    """What became of grading. Only GRADED carries a reward; the others drop the trajectory, never score it 0.

    NO_PROMPT: the task could not make the prompt, or made one longer than the config allows; nothing was generated.
    """

    GRADED = "graded"
    RAISED = "raised"
    DEADLINE = "deadline"
    NO_PROMPT = "no_prompt"


class TrajectorySpec(msgspec.Struct, frozen=True):
    """All that a rollout needs to generate a trajectory, or to go on with one.

    `group` is the number of the prompt hand-out; its members share `prompt` (an index into the prompts of `purpose`) and
    differ in `sample`. `seed` keys the sampling noise: the tokens are a function of the weights, the prompt and it.
    `resume_tokens` counts the response tokens that the store already holds (0: start from the prompt).
    """

    id: int
    group: int
    prompt: int
    sample: int
    purpose: Purpose
    seed: int
    resume_tokens: int = 0


class Segment(msgspec.Struct, frozen=True):
    """A run of consecutive tokens of one source, generated under one weight version (None for prompt and tool)."""

    source: Source
    tokens: int
    version: int | None = None

    @property
    def trained_on(self) -> bool:
        """The loss mask of all tokens of this segment."""
        return self.source is Source.MODEL


class Block(msgspec.Struct, frozen=True):
    """Payload: a run of tokens of one segment.

    `offset` is the position of the first token in the trajectory (0 is the first prompt token). `tokens` is int32 and
    `logprobs` float32, both little-endian; `logprobs` is empty except for Source.MODEL, where it has one entry a token:
    the log-probability that the generating policy gave the token.
    """

    trajectory: int
    offset: int
    source: Source
    version: int | None
    tokens: bytes
    logprobs: bytes = b""

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // 4

    @property
    def end(self) -> int:
        """Offset of the token after the last one."""
        return self.offset + self.count
