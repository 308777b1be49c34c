#!/usr/bin/env bash
# Runs the tests with routers as they are published, vllm-router and Dynamo's SelectionService, fed by
# this package's KV events.
#
#   tests/engines/routers.sh [PYTEST ARGUMENTS]
#
# The routers are installed into an environment of their own, that sees the packages of this one: pydantic
# and other dependencies of theirs conflict with some versions that transformers needs. If their wheels
# cannot be installed, as on other platforms than Linux on x86-64, the script prints that and exits with 0.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python -m venv "$work/venv"
if ! timeout 300 env -u PYTHONPATH "$work/venv/bin/pip" install -q --only-binary=:all: \
    ai-dynamo-runtime==1.6.1 vllm-router==0.1.17 2>"$work/pip.log"; then
    tail -n 3 "$work/pip.log"
    echo "SKIPPED: the wheels of vllm-router and ai-dynamo-runtime cannot be had here"
    exit 0
fi
# Appended to the path: this environment's packages come first.
site=$(env -u PYTHONPATH "$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
here=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PATH=$PATH:$work/venv/bin
export PYTHONPATH=$PWD:$here:$site${PYTHONPATH:+:$PYTHONPATH}

timeout 900 python -m pytest -q -m "" tests/integration/test_routers.py "$@"
timeout 300 python examples/two_replicas.py
