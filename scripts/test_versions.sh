#!/usr/bin/env bash
# Test the exporter and the runtime with the oldest releases that pyproject.toml takes, and with the newest there are.
#
#     scripts/test_versions.sh                    both, a few thousand seconds
#     scripts/test_versions.sh oldest             one of them
#     scripts/test_versions.sh newest -k ort      what follows goes to pytest
#
# Each has an environment of its own, .venv-oldest and .venv-newest: remove it to have it made anew. PYTHON names the
# interpreter that makes it.
set -euo pipefail

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
cd -- "$root"
ends=(oldest newest)
if [[ ${1:-} == oldest || ${1:-} == newest ]]; then
    ends=("$1")
    shift
elif [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
elif [[ $# -gt 0 ]]; then
    printf 'error: no end %q: write oldest or newest, and after it what pytest is to get\n' "$1" >&2
    exit 2
fi
# What depends on other packages' releases: export, the graphs in ONNX Runtime, the runtime's own libraries.
tests=(tests/export/test_exported.py tests/export/test_build.py tests/export/test_compat.py tests/export/test_extend.py
    tests/export/weights tests/export/test_text_only.py tests/engines/test_external.py tests/engines/test_ort.py
    tests/engines/test_ort_operators.py tests/runtime/test_generation.py tests/runtime/test_session.py
    tests/runtime/test_prompt.py)

# The oldest releases of what the project itself names, and of the rest what goes with them; pip cannot look for them.
oldest() {
    "$1" -m pip install -qq --disable-pip-version-check uv
    "$(dirname -- "$1")/uv" pip compile --quiet --resolution lowest-direct --no-header --no-annotate \
        --extra export --extra serve --extra scripts pyproject.toml
}

failed=()
for end in "${ends[@]}"; do
    venv=$root/.venv-$end
    python=$venv/bin/python
    if [[ ! -e $venv/.complete ]]; then
        rm -rf -- "$venv"
        "${PYTHON:-python3}" -m venv -- "$venv"
        constraints=$venv/constraints.txt
        if [[ $end == oldest ]]; then oldest "$python" >"$constraints"; else : >"$constraints"; fi
        printf '%s: installing into %s\n' "$end" "$venv"
        "$python" -m pip install -qq --disable-pip-version-check --constraint "$constraints" \
            --editable "${root}[export,serve,scripts]" hypothesis filelock pytest pytest-xdist
        touch -- "$venv/.complete"
    fi
    "$python" -m pip list --format=freeze | grep -iE '^(torch|transformers|onnx|onnx-ir|onnxscript|onnxruntime|numpy|tokenizers|pillow)=='
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -n 2 --dist worksteal "${tests[@]}" "$@" || failed+=("$end")
done
if [[ ${#failed[@]} -gt 0 ]]; then
    printf 'failed with the %s releases\n' "${failed[*]}" >&2
    exit 1
fi
