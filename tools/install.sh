#!/bin/sh
# usage: install.sh VENV WHAT
# Creates the virtual environment VENV if it does not exist or is incomplete, and installs
# WHAT ('.[play]' or '.[dev]') into it in editable mode. PYTHON is the interpreter to use, and
# TORCH_INDEX a different package index for torch.
set -eu
venv=$1
what=$2

stop() {
    echo "reverie: $1" >&2
    echo "  Fix: $2" >&2
    exit 2
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=
    for name in ${PYTHON:-python3 python3.12 python3.13 python3.11 python3.14 python}; do
        if new_enough "$name"; then
            python=$name
            break
        fi
    done
    if [ -z "$python" ]; then
        found=$("${PYTHON:-python3}" --version 2>&1 || echo "no Python at all")
        stop "Reverie needs Python 3.11 or newer; found: $found" \
            "install one, then run make again with PYTHON=/path/to/python3.12"
    fi
    echo "Creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" || {
        rm -rf "$venv"
        stop "$python cannot create a virtual environment (its venv module is missing)." \
            "sudo apt install python3-venv, or use another Python with PYTHON=..."
    }
    "$venv/bin/python" -m pip install -q --upgrade pip ||
        echo "pip could not upgrade itself; using the bundled version." >&2
fi

# Install torch first, so that TORCH_INDEX is used for torch only. Python compiles modules
# when they are imported first, and most of them never are.
torch=$("$venv/bin/python" -c '
import tomllib
with open("pyproject.toml", "rb") as file:
    needs = tomllib.load(file)["project"]["dependencies"]
print(next(need for need in needs if need.startswith("torch")))')
echo "Installing $torch (the largest part; this can take some minutes)"
"$venv/bin/python" -m pip install -q --no-compile ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch" ||
    stop "pip could not install torch." \
        "check the network and the disk (df -h .), then run make again"
echo "Installing reverie (editable, $what)"
log=$venv/install.log
"$venv/bin/python" -m pip install --no-compile -e "$what" >"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    stop "pip could not install reverie; the end of $log is above." \
        "correct the first error in it and run make again"
}
