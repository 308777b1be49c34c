#!/usr/bin/env bash
# Runs Megatron Core's own tests of prefix caching twice, with its slots and with this package's.
#
#   MEGATRON_ROOT=CHECKOUT tests/engines/megatron_own_tests.sh [TEST FILES OF THE CHECKOUT]
#
# Each test must end the same way in both. They need what Megatron's tests need: a CUDA device, and
# torch.distributed for one process. Python of this environment.
set -euo pipefail

if [ -z "${MEGATRON_ROOT:-}" ] || [ ! -d "$MEGATRON_ROOT/megatron/core" ]; then
    echo "skipped: MEGATRON_ROOT names no checkout of Megatron-LM"
    exit 0
fi
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$MEGATRON_ROOT"
tests=tests/unit_tests/inference
if [ $# -eq 0 ]; then
    mapfile -t found < <(find "$tests" -name 'test_*mamba_prefix_caching*.py' \
        -o -name 'test_dynamic_prefix_caching.py' -o -name 'test_hybrid_prefix_caching_e2e.py' | sort)
    set -- "${found[@]}"
fi
if [ $# -eq 0 ]; then
    echo "skipped: this checkout has no tests of prefix caching under $tests"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

outcomes() {  # NAME [PYTEST OPTIONS]: how each test ended, by its name
    local name=$1 status=0
    shift
    RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29571 \
        PYTHONPATH="$PWD:$root:$root/tests/engines" \
        python -m pytest -q -rA -p no:cacheprovider "$@" "${files[@]}" >"$work/$name.log" 2>&1 || status=$?
    if [ "$status" -gt 1 ]; then
        cat "$work/$name.log"
        exit "$status"
    fi
    sed -nE 's/^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) ([^ ]*).*/\2 \1/p' "$work/$name.log" | sort >"$work/$name"
}

files=("$@")
outcomes own
outcomes ours -p megatron_slots
if ! diff "$work/own" "$work/ours"; then
    echo "the lines above end otherwise with this package's slots"
    exit 1
fi
echo "$(grep -c ' PASSED$' "$work/ours" || true) passed, $(grep -cE ' (FAILED|ERROR)$' "$work/ours" || true) failed, with both"
