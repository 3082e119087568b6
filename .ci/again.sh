#!/usr/bin/env bash
# After pytest has failed: run what failed once more, alone, and say what it was. A machine that is busy with other work holds up tests
# of several processes now and then; a defect fails twice. More than a few are not run again.
#   .ci/again.sh PYTHON CACHE_DIR PYTEST_ARGUMENTS...      CACHE_DIR is that of the run that failed
set -euo pipefail
python=$1 cache=$2
shift 2
most=3

failed=$("$python" - "$cache/v/cache/lastfailed" <<'PYTHON'
import json, pathlib, sys

path = pathlib.Path(sys.argv[1])
print(*(json.loads(path.read_text()) if path.exists() else []), sep="\n")
PYTHON
)
count=$(grep -c . <<<"$failed" || true)
if [ "$count" -eq 0 ] || [ "$count" -gt "$most" ]; then
  echo "$count tests are known to have failed: none is run again" >&2
  exit 1
fi
printf 'FAILED ONCE, and run again alone:\n%s\n' "$failed"
exec "$python" -m pytest -q -o cache_dir="$cache" --last-failed --last-failed-no-failures none "$@"
