#!/usr/bin/env bash
# Usage: bash tests/gpu.sh [pytest options]     checks the GPU paths on one GPU, in at most 10 minutes
# Takes the environment as it is (PYTHON=... chooses it): needs torch built for the GPU, transformers, pytest and what the
# core needs; checks of vLLM, Megatron-core and Transformer Engine run where these are installed, and are skipped elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

"$python" - << 'PY'
import importlib.metadata
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("torch finds no GPU here")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
for name in ("transformers", "vllm", "megatron-core", "transformer-engine"):
    try:
        print(f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        print(f"{name}: not installed")
PY

exec timeout 600 "$python" -m pytest -m gpu -v --durations=0 "$@"
