#!/usr/bin/env bash
# Lint, type check and test, in the environment that constraints.txt pins. Arguments go to pytest:
#
#     scripts/test.sh                                  what continuous integration runs
#     scripts/test.sh -m "not slow"                    what takes seconds
#     scripts/test.sh -m ""                            everything, also what takes minutes
#     scripts/test.sh tests/engines -k ort
set -euo pipefail

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
cd -- "$root"
bash scripts/environment.sh export,serve,ray,trt-rtx,scripts,dev
python=$root/.venv/bin/python

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two test processes share the cores
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
exec "$python" -m pytest -n 2 --dist worksteal "$@" # neighbours share what a file sets up
