#!/usr/bin/env bash
# The site of docs/, with warnings as errors: `make docs`. What the extra `docs` of pyproject.toml names comes into .venv/docs,
# which adds to the first virtual environment, because the reference imports the package.
#   .ci/docs.sh [FOLDER]      FOLDER gets the site (default: build/site)
set -euo pipefail
cd "$(dirname "$0")/.."

folder=.venv/docs
mapfile -t packages < <(.venv/bin/python -c "
import tomllib
print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')")
if [ "$(cat "$folder/.ready" 2>/dev/null)" != "${packages[*]}" ]; then
  .venv/bin/python -m venv "$folder"
  site=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
  .venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$site/first.pth"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
  echo "${packages[*]}" > "$folder/.ready"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$folder/bin/python" -m sphinx -W --keep-going -q -b html docs "${1:-build/site}"
echo "the site is in ${1:-build/site}"
