#!/usr/bin/env bash
# What one NVIDIA card does with the 411M model: the micro-batch that fits, seconds a step plain, compiled and with 8-bit products (where
# torchao is installed), one kill-and-resume.
#
#   bash benchmarks/gpu_check.sh                 one H100 or H200, no network, at most 6 minutes
#   bash benchmarks/gpu_check.sh --cpu           the same path with the toy model on a CPU: shows that the script works, no more
#
# PYTHON=python3 chooses the interpreter (torch with CUDA, numpy, pyarrow, xxhash, mosaicml-streaming, click, tqdm). Prints one table with the
# card's name; exit code 0 only if every part has run and the resumed run has the losses of the unbroken one.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after=10 360 "$PYTHON" benchmarks/gpu_check.py "$@"
