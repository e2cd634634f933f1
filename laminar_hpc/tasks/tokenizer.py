"""Text to tokens and back, from the files in a model directory, without torch or transformers.

Some of a tokenizer's added tokens are *control tokens*, which text from a data set must not become: those that are flagged
special, and those between bars, <|...|> (the bars may be full-width), flagged or not. The models that DeepSeek has
distilled from R1 into Llama and Qwen open turns with User and Assistant between such bars, and flag neither.

All other added tokens are encoded as tokens wherever they stand, as transformers does: <think>, <tool_call>, runs of spaces,
HTML tags. They open no turn and end none, and models have learned them as a part of what messages say. Some chat templates
look for them in there (Qwen3's cuts earlier answers at </think>), and would take marks around them for text.
"""

from __future__ import annotations

import os
import re

import tokenizers

from laminar_hpc.errors import ConfigError

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Around a control token that is to be encoded as text. Unicode keeps these two out of all text on purpose."""

_IN_BARS = re.compile("<([|\uff5c]).+\\1>", re.DOTALL)

_QUOTED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")


class Tokenizer:
    """The tokenizer of a model directory."""

    def __init__(self, model_dir: str) -> None:
        """Reads tokenizer.json; ConfigError where it is missing or broken."""
        path = os.path.join(model_dir, "tokenizer.json")
        if not os.path.isfile(path):
            raise ConfigError(
                f"model.path: {path}: no such file; the directory must hold config.json and tokenizer.json"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"model.path: {path}: not a tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # None where every character has a token; the library's types know only the models' common class
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._unknown = None if unknown is None else self._tokenizer.token_to_id(unknown)
        added = [token for token in self._tokenizer.get_added_tokens_decoder().values() if token.content]
        unflagged = [token.content for token in added if not token.special and _IN_BARS.fullmatch(token.content)]
        self._tokenizer.add_special_tokens(unflagged)
        control = unflagged + [token.content for token in added if token.special]
        longest_first = sorted(control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def quote(self, text: str) -> str:
        """`text` with marks around what is a control token, so that `encode` takes it as the text that it is."""
        text = text.replace(_OPEN, "\ufffd").replace(_CLOSE, "\ufffd")
        return self._control.sub(lambda match: f"{_OPEN}{match[0]}{_CLOSE}", text) if self._control else text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of `text`; added tokens in it become their ids, except where `quote` has marked them.

        `add_special_tokens`: with those that the tokenizer's own post-processor adds, if any.
        """
        parts = _QUOTED.split(text)  # text, quoted, text, quoted, ..., text
        if len(parts) == 1:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        encoded = []
        for index, part in enumerate(parts):
            self._tokenizer.encode_special_tokens = index % 2 == 1  # true: they are encoded as text
            encoded.append(self._tokenizer.encode(part, add_special_tokens=False))
        self._tokenizer.encode_special_tokens = False
        whole = tokenizers.Encoding.merge(encoded, growing_offsets=True)
        return list(self._tokenizer.post_process(whole, add_special_tokens=add_special_tokens).ids)

    @property
    def may_not_know(self) -> bool:
        """Whether there may be text that becomes the token for what is unknown."""
        return self._unknown is not None

    def unknown_in(self, text: str) -> str | None:
        """The first piece of `text`, which may have marks of `quote`, that has no token of its own; None where all have."""
        if self._unknown is None:
            return None
        for part in _QUOTED.split(text)[::2]:  # between them are names of control tokens
            encoding = self._tokenizer.encode(part, add_special_tokens=False)
            for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
                if token == self._unknown:
                    return part[begin:end]
        return None

    def decode(self, tokens: list[int]) -> str:
        """The text of these tokens, control tokens left out."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
