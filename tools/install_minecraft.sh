#!/bin/sh
# Install Reverie with MineRL 0.4.4 into a virtual environment of its own.
#
#   sh tools/install_minecraft.sh [VENV] [PYTHON]
#
# MineRL 0.4.4 needs Java 8 to build and run Minecraft, which it downloads, and an old
# gym that only builds with old tools, on Python 3.11 at most. Run on a machine without
# a display it also needs xvfb: `xvfb-run -a VENV/bin/reverie train --task ...`.
set -eu

venv=${1:-.venv-minecraft}
python=${2:-python3.11}
here=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    echo "install_minecraft: $1" >&2
    echo "  Fix: $2" >&2
    exit 2
}

command -v "$python" >/dev/null ||
    fail "there is no $python" "install Python 3.11, or name it: sh $0 $venv PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    fail "$python is not Python 3.11" "name one that is: sh $0 $venv python3.11"
command -v javac >/dev/null ||
    fail "there is no Java compiler" "install a Java 8 JDK (openjdk-8-jdk)"
javac -version 2>&1 | grep -q '1\.8\.' ||
    fail "$(javac -version 2>&1) is not Java 8" \
        "install openjdk-8-jdk and put it first in PATH"

"$python" -m venv "$venv"
pip="$venv/bin/pip --disable-pip-version-check"
$pip install --quiet 'pip<24.1' 'setuptools==65.5.0' 'wheel==0.38.4'
$pip install --quiet 'numpy<2' 'cloudpickle'
$pip install --quiet --no-build-isolation --no-deps 'gym==0.19.0'
# Builds Minecraft with Gradle: some minutes, and some gigabytes in the home folder.
$pip install --no-build-isolation 'minerl==0.4.4'
$pip install --quiet 'setuptools>=77'  # needed to build Reverie
$pip install --quiet "$here" 'numpy<2'
"$venv/bin/python" -c 'import minerl, reverie' ||
    fail "MineRL does not import" "read the lines above"
echo "Done. Try: $venv/bin/reverie check-env minecraft_diamond"
