#!/bin/sh
# Build DeepMind Lab from its repository and install it into a virtual environment.
#
#   sh tools/install_dmlab.sh [VENV] [SOURCES]
#
# DeepMind Lab is not on the package index. Building it needs bazel and, on Debian and
# Ubuntu: apt-get install build-essential git gettext zip libffi-dev freeglut3-dev
# libsdl2-dev libosmesa6-dev python3-dev python3-numpy. VENV must have Reverie in it.
set -eu

venv=${1:-.venv}
sources=${2:-.local/lab}
repository=https://github.com/google-deepmind/lab

fail() {
    echo "install_dmlab: $1" >&2
    echo "  Fix: $2" >&2
    exit 2
}

[ -x "$venv/bin/python" ] ||
    fail "there is no virtual environment $venv" "make install, or name one: sh $0 VENV"
command -v git >/dev/null || fail "there is no git" "apt-get install git"
command -v bazel >/dev/null ||
    fail "there is no bazel" "install bazelisk as \`bazel\` (it downloads the right version)"

venv=$(cd "$venv" && pwd)
[ -d "$sources/.git" ] || git clone --depth 1 "$repository" "$sources"
cd "$sources"
export PYTHON_BIN_PATH="$venv/bin/python"
"$venv/bin/pip" install --quiet setuptools wheel
bazel build -c opt --python_version=PY3 \
    //python/pip_package:build_pip_package
./bazel-bin/python/pip_package/build_pip_package "$PWD/dist"
"$venv/bin/pip" install --force-reinstall --no-deps dist/deepmind_lab-*.whl
"$venv/bin/python" -c 'import deepmind_lab' ||
    fail "DeepMind Lab does not import" "read the lines above"
echo "Done. Try: $venv/bin/reverie check-env dmlab_explore_goal_locations_small"
