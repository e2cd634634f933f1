"""What the task worker asks of a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from laminar_hpc.protocol.trajectory import Purpose

Quote = Callable[[str], str]
"""Marks a data set's text, so that what looks like a control token in it is encoded as the text that it is."""


def unquoted(text: str) -> str:
    """The text as it is: for people, and for models whose tokenizer is not at hand."""
    return text


class TextTokens(Protocol):
    """Text to tokens and back."""

    @property
    def may_not_know(self) -> bool:
        """Whether there may be text that becomes the token for what is unknown."""

    def unknown_in(self, text: str) -> str | None:
        """The first piece of `text`, which may have marks of `quote`, that has no token of its own; None where all have."""

    def quote(self, text: str) -> str:
        """`text` with marks around what looks like a control token, so that `encode` takes it as the text that it is."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of `text`, with those that the tokenizer itself adds where that is asked for."""

    def decode(self, tokens: list[int]) -> str:
        """The text of these tokens, control tokens left out."""


class PromptCounts(NamedTuple):
    """How many training prompts and how many held-out prompts there are."""

    prompts: int
    held_out: int


class Task(Protocol):
    """Prompts by number, and the reward of a response to one of them.

    Everything is a function of the config: two processes that build a task from the same config see the same prompts
    under the same numbers. No held-out prompt is among the training prompts.
    """

    @property
    def prompts(self) -> int:
        """Training prompts (Purpose.TRAIN) have the indices 0 to `prompts` - 1."""

    @property
    def held_out(self) -> int:
        """Held-out prompts (Purpose.EVALUATION) have the indices 0 to `held_out` - 1."""

    @property
    def has_special_tokens(self) -> bool:
        """Whether `text` brings all special tokens itself, as a chat template does; else the tokenizer adds its own."""

    def text(self, purpose: Purpose, index: int, quote: Quote = unquoted) -> str:
        """The text given to the model, the templates applied. What comes from the data set goes through `quote`."""

    def solution(self, purpose: Purpose, index: int) -> str:
        """A response that is right: what a supervised warm start imitates."""

    def grade(self, purpose: Purpose, index: int, response: str) -> float:
        """The reward of a response, 1 for a right one. May raise: then the response has no reward, which is not 0."""
