"""`laminar model smollm2`: SmolLM2-135M-Instruct as a Hugging Face directory, without a download."""

from __future__ import annotations

from laminar_hpc.launch.new_directory import check_new, new_directory


def make(directory: str, dtype: str) -> str:
    """Make the model in the new directory `directory`, with weights of `dtype`; what came of it, in one line.

    ConfigError where the directory is not empty or cannot be made, or a package is missing.
    """
    check_new(directory)
    from laminar_hpc.trainer.smollm2 import make_smollm2

    with new_directory(directory) as part:
        parameters = make_smollm2(part, dtype)
    return f"{directory}: SmolLM2-135M-Instruct, {parameters:,} parameters in {dtype}"
