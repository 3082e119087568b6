#!/usr/bin/env bash
# The wheel and the source distribution, and the tests from the unpacked source distribution.
#   .ci/release.sh [FOLDER]      FOLDER gets both files (default: build/dist); ARGS goes to `make test`
set -euo pipefail
cd "$(dirname "$0")/.."

dist=$(realpath -m "${1:-build/dist}")
make .venv/.ready
.venv/bin/python -m pip install --quiet --disable-pip-version-check "build>=1.2"
rm -rf "$dist"
.venv/bin/python -m build --outdir "$dist" .
version=$(.venv/bin/python -c "import dfa_megatron; print(dfa_megatron.__version__)")
grep -q "^## $version" CHANGELOG.md || { echo "CHANGELOG.md has no section $version" >&2; exit 1; }
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
tar -xzf "$dist/dfa_megatron-$version.tar.gz" -C "$unpacked"
make -C "$unpacked/dfa_megatron-$version" test ARGS="${ARGS:-}"
