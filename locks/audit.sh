#!/usr/bin/env bash
# A software bill of materials (CycloneDX, JSON) of every lock, then the known vulnerabilities of what is in them.
#   locks/audit.sh [FOLDER]      FOLDER takes the bills (default: build/sbom)
# The second part asks PyPI's vulnerability service; a package that it cannot answer for is an error (--strict).
set -euo pipefail
cd "$(dirname "$0")/.."

python=$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)
folder=${1:-build/sbom}
tools=${TOOLS:-.venv/supply}
if ! cmp --silent locks/tools.txt "$tools/tools.txt"; then
  "${PYTHON:-$python}" -m venv --clear "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement locks/tools.txt
  cp locks/tools.txt "$tools/tools.txt"
fi

export PYTHONWARNINGS=ignore # a lock has no graph of what needs what, of which cyclonedx-py warns
mkdir -p "$folder"
for lock in ngc cpu dev build; do
  "$tools/bin/cyclonedx-py" requirements --output-reproducible --pyproject pyproject.toml --mc-type library \
    --of JSON --output-file "$folder/$lock.cdx.json" "locks/$lock.txt"
  echo "$folder/$lock.cdx.json"
done

status=0
for lock in ngc cpu dev build; do
  "$tools/bin/pip-audit" --strict --progress-spinner off --disable-pip --require-hashes --requirement "locks/$lock.txt" || status=1
done
exit "$status"
