#!/usr/bin/env bash
# Runs TRL's GRPO trainer on a tiny hybrid model, whose rollouts come from an installed prefix cache.
#
#   tests/engines/trl.sh [PYTEST ARGUMENTS]
#
# TRL and its dependencies are installed into an environment of their own, that sees the packages of this one:
# the extras test, serve and peft. Python 3.11 or later.
set -euo pipefail
cd "$(dirname "$0")/../.."

if ! python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "skipped: TRL 1.16 is run with Python 3.11 or later, and this is $(python -V)"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python -m venv "$work/venv"
timeout 300 env -u PYTHONPATH "$work/venv/bin/pip" install -q --no-deps --only-binary=:all: -c constraints.txt \
    trl datasets dill multiprocess pandas pyarrow python-dateutil six

# Appended to the path: this environment's packages come first.
site=$(env -u PYTHONPATH "$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
here=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PYTHONPATH=$PWD:$here:$site${PYTHONPATH:+:$PYTHONPATH}

HF_HUB_OFFLINE=1 HF_DATASETS_CACHE=$work/datasets timeout 600 python -m pytest -q -p no:cacheprovider \
    tests/integration/test_trl.py "$@"
