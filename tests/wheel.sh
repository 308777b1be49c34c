#!/usr/bin/env bash
# Builds the wheel and the sdist, checks both, and runs the command line of the installed wheel in a
# fresh environment from which the checkout cannot be seen.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH VIRTUAL_ENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 NO_COLOR=1

python -m build --no-isolation --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
twine check --strict "$work"/dist/*
wheel=$(echo "$work"/dist/*.whl) sdist=$(echo "$work"/dist/*.tar.gz)

# The sdist is what git has: the tests, and all that they read.
tar tzf "$sdist" | sed 's,^[^/]*/,,' | grep -v '^PKG-INFO$' | sort >"$work/in_sdist"
git ls-files --cached --others --exclude-standard | sort >"$work/in_git"
diff "$work/in_git" "$work/in_sdist"
python -m zipfile -l "$wheel" >"$work/in_wheel"  # not a pipe: grep -q would break it at the first hit
grep -q "^mamba_cache/py.typed " "$work/in_wheel" || { echo "the wheel lacks py.typed"; exit 1; }

"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q -c constraints.txt "$wheel"
cd "$work"
bin=$work/venv/bin
location=$("$bin/python" -c 'import mamba_cache; print(mamba_cache.__file__)')
case $location in "$checkout"/*) echo "the checkout was imported, not the wheel"; exit 1 ;; esac
"$bin/mamba-cache" --version
"$bin/mamba-cache" doctor
"$bin/mamba-cache" plan nemotron-h-8b --memory 80
