#!/usr/bin/env bash
# Runs this package's slots in real contexts of Megatron Core, and its kernels under this package's context.
#
#   tests/engines/megatron.sh [FOLDER [PYTEST ARGUMENTS]]
#
# FOLDER is where its wheel lies or is downloaded to, 2 MB; without one, to a folder deleted afterwards.
# It is unpacked and imported, never installed. An environment with the extra `test` has all it needs. On a
# machine with a CUDA device, tests/gpu/test_real_kernels_gpu.py may be named as well.
set -euo pipefail

if [ $# -gt 0 ]; then
    mkdir -p "$1"
    wheels=$(cd "$1" && pwd)
    shift
else
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
fi
cd "$(dirname "$0")/../.."

version=0.19.2
if ! compgen -G "$wheels/megatron_core-$version-*.whl" >/dev/null; then
    timeout 300 python -m pip download -q --no-deps --python-version 3.12 --only-binary=:all: \
        --dest "$wheels" "megatron-core==$version"
fi

[ $# -gt 0 ] || set -- tests/integration/test_megatron_real.py tests/integration/test_real_kernels.py
MEGATRON_WHEELS=$wheels timeout 1500 python -m pytest -q -m "" "$@"
