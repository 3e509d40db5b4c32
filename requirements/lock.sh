#!/usr/bin/env bash
# Writes requirements/lock.txt: every package of the project but torch and what a CUDA build of torch brings,
# for Python 3.11 to 3.13. Install it with --no-deps after torch (`make venv` does both).
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)   # never compile onto the old file: its lines would count as preferences
trap 'rm -rf "$fresh"' EXIT
cat requirements/constraints.txt requirements/torch.txt >"$fresh/constraints.txt"
uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
    --extra training --extra models --extra airflow --extra clusters --extra clusters-test --extra dev \
    --override requirements/overrides.txt --constraint "$fresh/constraints.txt" "$@" \
    pyproject.toml --output-file "$fresh/lock.txt"
grep -vE "sys_platform == '(never|win32|emscripten)'|^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z-]+)==" "$fresh/lock.txt" |
    sed -E "s/ ; sys_platform != 'emscripten'$//" >requirements/lock.txt
