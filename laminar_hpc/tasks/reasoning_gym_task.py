"""reasoning-gym data sets as tasks: prompts drawn from a seed, responses graded by the data set's own verifier.

Which questions are held out is a property of the question's text: a quarter of all texts, by digest. So no held-out
question is ever trained on, with this seed or another, and nothing has to be drawn in advance to know it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import time
import warnings
from typing import Any

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.answers import OPEN_TAG, as_response, final_answer
from laminar_hpc.tasks.api import Quote, unquoted
from laminar_hpc.tasks.prompts import PromptText

with warnings.catch_warnings():  # some of its data sets' libraries are old
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

Entry = dict[str, Any]

_HELD_OUT_SHARE = 4  # one text in so many
_SEARCH_FACTOR = 10 * _HELD_OUT_SHARE  # ten times the draws that are needed where all questions differ
_SEARCH_START = 400
_ATTEMPTS = 32  # for one training prompt; where a quarter is held out, all fail once in 10**19
_SMALLEST_BLOCK = 1024


class ReasoningGymTask:
    """A reasoning-gym data set.

    Training prompt i is the first of the draws i, i + B, i + 2B, ... whose question is not held out (B: size of a block
    of draws). Held-out prompts are the different held-out questions in the order of the draws 0, 1, 2, ... Where a data
    set has few questions, training prompts repeat; held-out prompts never do.
    """

    def __init__(self, config: Config, search_limit_s: float | None = None) -> None:
        """Draws the held-out prompts; ConfigError where name or parameters are wrong or the data set has too few questions.

        `search_limit_s` bounds the time of that search (None: no bound): after it `held_out` is what was found until then.
        """
        self._prompt_text = PromptText(config)
        self._tags_required = OPEN_TAG in config.task.template
        self._prompts = config.task.prompts
        self._draws = _Draws(config)
        wanted = config.evaluation.prompts if config.evaluation.every else 0
        self._held_out = self._find_held_out(wanted, search_limit_s)
        self._entry = functools.lru_cache(maxsize=4096)(self._find_entry)

    @property
    def prompts(self) -> int:
        """Number of training prompts."""
        return self._prompts

    @property
    def held_out(self) -> int:
        """Number of held-out prompts."""
        return len(self._held_out)

    @property
    def has_special_tokens(self) -> bool:
        """Whether the text comes out of a chat template."""
        return self._prompt_text.has_special_tokens

    def text(self, purpose: Purpose, index: int, quote: Quote = unquoted) -> str:
        """The question, in the templates."""
        return self._prompt_text.text(self._entry(purpose, index)["question"], quote)

    def solution(self, purpose: Purpose, index: int) -> str:
        """The data set's own answer, between tags where the template asks for them."""
        return as_response(str(self._entry(purpose, index)["answer"]), self._tags_required)

    def grade(self, purpose: Purpose, index: int, response: str) -> float:
        """The data set's score of the answer; 0 where the template asks for <answer></answer> and there is none."""
        answer = final_answer(response, self._tags_required)
        if answer is None:
            return 0.0
        return float(self._draws.score(answer, self._entry(purpose, index)))

    def _find_entry(self, purpose: Purpose, index: int) -> Entry:
        if purpose is Purpose.EVALUATION:
            return self._draws[self._held_out[index]]
        if not 0 <= index < self._prompts:
            raise IndexError(f"training prompt {index}: there are {self._prompts}")
        for draw in range(index, index + _ATTEMPTS * self._draws.block, self._draws.block):
            entry = self._draws[draw]
            if not _is_held_out(entry["question"]):
                return entry
        raise ConfigError(
            f"{self._draws.name}: no question to train on in {_ATTEMPTS} draws; allow more different questions"
        )

    def _find_held_out(self, wanted: int, limit_s: float | None) -> list[int]:
        began_s = time.monotonic()
        found: dict[str, int] = {}
        limit = _SEARCH_START + wanted * _SEARCH_FACTOR
        for draw in range(limit):
            if len(found) == wanted or (limit_s is not None and time.monotonic() - began_s > limit_s):
                break
            question = self._draws[draw]["question"]
            if _is_held_out(question):
                found.setdefault(question, draw)
        else:
            if len(found) < wanted:
                raise ConfigError(
                    f"{self._draws.name}: only {len(found)} different held-out questions in {limit} draws; evaluation.prompts "
                    f"= {wanted} must be at most that, or task.parameters must allow more questions"
                )
        return list(found.values())


def _is_held_out(question: str) -> bool:
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()[0] % _HELD_OUT_SHARE == 0


class _Draws:
    """An endless row of entries, a function of the config alone; a new block of `block` entries has a new seed.

    Blocks, because some data sets make all their entries when they are created, and know no others.
    """

    def __init__(self, config: Config) -> None:
        self.name = f"task.dataset {config.task.dataset!r}"
        self.block = max(config.task.prompts, _SMALLEST_BLOCK)
        self._dataset = config.task.dataset
        self._parameters = dict(config.task.parameters)
        self._seed = config.job.seed
        self._blocks: dict[int, reasoning_gym.dataset.ProceduralDataset] = {}
        _check_names(self._dataset, self._parameters)
        self._try_out()

    def __getitem__(self, draw: int) -> Entry:
        number, index = divmod(draw, self.block)
        if number not in self._blocks:
            self._blocks[number] = self._create(number)
        entry: Entry = self._blocks[number][index]
        return entry

    def score(self, answer: str, entry: Entry) -> float:
        """The data set's own verdict."""
        return float(self._blocks[0].score_answer(answer, entry))

    def _create(self, number: int) -> reasoning_gym.dataset.ProceduralDataset:
        # Entries are seeded with seed + index: digests put the blocks of neighbouring seeds far apart.
        digest = hashlib.sha256(f"{self._seed}:{number}".encode()).digest()
        seed = int.from_bytes(digest[:4], "little") >> 1
        return reasoning_gym.create_dataset(self._dataset, size=self.block, seed=seed, **self._parameters)

    def _try_out(self) -> None:
        try:
            pairs = [(self[draw]["question"], self[draw]["question"]) for draw in (0, 1)]
        except Exception as error:  # foreign code, fed with parameters of any type
            text = " ".join(str(error).split())
            raise ConfigError(f"task.parameters of {self._dataset}: {text or type(error).__name__}") from error
        if any(first != second for first, second in pairs):
            raise ConfigError(f"{self.name}: the same seed gives different questions, so ranks could not agree on them")


def _check_names(dataset: str, parameters: dict[str, Any]) -> None:
    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=5, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"task.dataset: reasoning-gym has no data set {dataset!r}; {hint}")
    allowed = [field.name for field in dataclasses.fields(DATASETS[dataset][1]) if field.name not in ("seed", "size")]
    for name in parameters:
        if name in ("seed", "size"):
            raise ConfigError(
                f"task.parameters.{name}: is set through {'job.seed' if name == 'seed' else 'task.prompts'}"
            )
        if name not in allowed:
            raise ConfigError(f"task.parameters: {dataset} has no parameter {name!r}; it has: {', '.join(allowed)}")
