"""Prompts that have a length and no meaning, for engines that generate nothing: a job's timing without a model."""

from __future__ import annotations

import math

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.policy.keyed import stable_hash
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.api import Quote, unquoted

DEFAULTS = {"min_tokens": 32, "max_tokens": 256}
"""Of `task.parameters`."""

FIRST_LETTER, LETTERS = ord("a"), 26

SURROGATES = range(0xD800, 0xE000)
"""Code points that no text may hold."""


class CharacterTokens:
    """A tokenizer for which a character is a token, and its code point the id; it has no control tokens."""

    may_not_know = False

    def unknown_in(self, text: str) -> str | None:
        """Nothing is unknown."""
        return None

    def quote(self, text: str) -> str:
        """The text as it is."""
        return text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The characters' code points; nothing is ever added."""
        return list(map(ord, text))

    def decode(self, tokens: list[int]) -> str:
        """A character for each token; those that stand for none become a question mark."""
        return "".join("?" if token in SURROGATES else chr(token) for token in tokens)


class SyntheticTask:
    """Prompts of random letters, whose lengths in tokens are spread evenly over the logarithms from `min_tokens` to `max_tokens`.

    Length and letters are functions of the purpose and the prompt's number. A response of an even number of tokens earns 1,
    others 0: groups have some of both, and that is all it means.
    """

    def __init__(self, config: Config) -> None:
        """ConfigError where `task.parameters` makes no sense."""
        self.prompts = config.task.prompts
        self.held_out = config.evaluation.prompts if config.evaluation.every else 0
        self.has_special_tokens = True
        self._seed = config.job.seed
        parameters = DEFAULTS | config.task.parameters
        unknown = sorted(parameters.keys() - DEFAULTS.keys())
        if unknown:
            raise ConfigError(
                f"task.parameters: unknown key {unknown[0]}; the task synthetic has {', '.join(DEFAULTS)}"
            )
        self._low, self._high = parameters["min_tokens"], parameters["max_tokens"]
        whole = type(self._low) is int and type(self._high) is int
        if not whole or not 1 <= self._low <= self._high <= config.rollout.max_prompt_tokens:
            raise ConfigError(
                f"task.parameters: min_tokens and max_tokens must be whole numbers with 1 <= min_tokens <= max_tokens <= "
                f"rollout.max_prompt_tokens ({config.rollout.max_prompt_tokens}), got {self._low!r} and {self._high!r}"
            )

    def prompt_tokens(self, purpose: Purpose, index: int) -> int:
        """The length of a prompt."""
        share = stable_hash("prompt length", self._seed, purpose.value, index) / 2**63
        return round(math.exp(math.log(self._low) + share * (math.log(self._high) - math.log(self._low))))

    def text(self, purpose: Purpose, index: int, quote: Quote = unquoted) -> str:
        """The letters of a prompt."""
        length = self.prompt_tokens(purpose, index)
        letters = stable_hash("prompt letters", self._seed, purpose.value, index)
        return quote(
            "".join(chr(FIRST_LETTER + letters // LETTERS ** (place % 13) % LETTERS) for place in range(length))
        )

    def solution(self, purpose: Purpose, index: int) -> str:
        """Two tokens, whatever the prompt is."""
        return "ok"

    def grade(self, purpose: Purpose, index: int, response: str) -> float:
        """1 for an even number of tokens, else 0."""
        return self.reward(len(response))

    @staticmethod
    def reward(response_tokens: int) -> float:
        """What a response of so many tokens earns."""
        return float(response_tokens % 2 == 0)
