"""The quickstart's model: a small Qwen2 over single characters, as a Hugging Face directory like any other."""

from __future__ import annotations

import json
import os
import string
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from laminar_hpc.trainer.warm_start import Example, WarmStart, WarmStartResult, warm_start

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
PAD_ID, END_ID = 0, 1
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, POSITIONS = 96, 2, 4, 2, 256, 512


def make_tiny_model(
    path: str,
    examples: Iterable[tuple[str, str]],
    held_out: Iterable[tuple[str, str]],
    seed: int,
    plan: WarmStart | None = None,
) -> WarmStartResult:
    """Make a model of about 0.2 million parameters in the directory `path`, which is made where there is none.

    `examples` and `held_out` are (prompt, answer) texts of the task, prompts as the template gives them. Writes
    config.json, generation_config.json, model.safetensors and tokenizer.json. Deterministic by `seed`. OSError where
    `path` cannot be made.
    """
    os.makedirs(path, exist_ok=True)  # refused now, not after the warm start
    torch.set_num_threads(1)  # the model is so small that threads would only wait for each other
    tokenizer = character_tokenizer()
    model = new_model(tokenizer.get_vocab_size(), seed)
    result = warm_start(
        model,
        [_example(tokenizer, *pair) for pair in examples],
        [_example(tokenizer, *pair) for pair in held_out],
        plan or WarmStart(),
        seed,
    )
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=PAD_ID)  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    tokenizer.save(os.path.join(path, "tokenizer.json"))
    with open(os.path.join(path, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "unk_token": UNKNOWN,
        }
        json.dump(settings, file, indent=2)
    return result


def character_tokenizer() -> Tokenizer:
    """Every printable ASCII character is a token; ids 0, 1, 2 are padding, end, and any other character."""
    vocabulary = {token: index for index, token in enumerate([PAD, END, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([PAD, END, UNKNOWN])
    return tokenizer


def new_model(vocabulary: int, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights, float32."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INTERMEDIATE,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Callable[..., Any] = Qwen2ForCausalLM
        model: Qwen2ForCausalLM = build(config)
        return model


def _example(tokenizer: Tokenizer, prompt: str, answer: str) -> Example:
    return Example(prompt=tokenizer.encode(prompt).ids, answer=[*tokenizer.encode(answer).ids, END_ID])
