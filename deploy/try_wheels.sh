#!/usr/bin/env bash
# `make try-wheels`: what a newcomer without a compiler gets from the wheels in dist/.
#
# Each wheel is installed into an empty place, and the default model answers. The wheel for this
# machine gets an environment of its own; the one for aarch64 runs in the emulator (Debian's
# qemu-user) on Debian's Python, whose packages are unpacked and not installed. Both must give the
# same tokens: the kernels promise equal bits on every processor.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-qwen2.5-coder-0.5b}
PLACE=$PWD/build/try-wheels
ANSWER='
import sys, time
begin = time.monotonic()
from headrace import LLM, SamplingParams
with LLM(sys.argv[1], threads=2, max_context=256) as llm:
    greedy = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[2]), ignore_eos=True)
    tokens = list(llm.generate("def fibonacci(n):", greedy)[0].outputs[0].token_ids)
    kernels = {d.name: d.value for d in llm.decisions}.get("kernels.level", "none")
print(f"{time.monotonic() - begin:.1f} s, level {kernels}", file=sys.stderr)
print(tokens)
'
TOKENS=4

native() {
  local begin=$SECONDS
  rm -rf "$PLACE/native"
  "$PYTHON" -m venv "$PLACE/native"
  # No compiler is found: CC and CXX name one that does not exist.
  CC=/nowhere CXX=/nowhere "$PLACE/native/bin/pip" install --quiet dist/headrace-*_x86_64.whl
  "$PLACE/native/bin/python" -c "$ANSWER" "$MODEL" $TOKENS >"$PLACE/native.tokens"
  echo "x86_64: from nothing to the answer in $((SECONDS - begin)) s (model in the cache)"
}

aarch64() {
  local root=$PLACE/aarch64 site=$PLACE/aarch64-site version
  version=$(apt-cache depends python3-minimal:arm64 | grep -o 'python3\.[0-9]*' | sort | tail -1)
  mkdir -p "$root" "$PLACE/debs"
  (cd "$PLACE/debs" && apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts \
    --no-breaks --no-replaces --no-enhances "$version:arm64" libstdc++6:arm64 |
    grep -E '^[a-z].*:arm64$' | sort -u | xargs apt-get download --quiet --quiet)
  for package in "$PLACE"/debs/*.deb; do dpkg --extract "$package" "$root"; done
  rm -rf "$site"
  # pip takes no platform for a later one: each glibc up to that of the wheel is named.
  "$PYTHON" -m pip install --quiet --target "$site" --only-binary=:all: --implementation cp \
    --python-version "${version#python}" --platform manylinux2014_aarch64 \
    $(seq --format='--platform manylinux_2_%.0f_aarch64' 17 34) dist/headrace-*_aarch64.whl
  PYTHONPATH=$site qemu-aarch64 -L "$root" "$root/usr/bin/$version" -c "$ANSWER" "$MODEL" $TOKENS \
    >"$PLACE/aarch64.tokens"
  cmp "$PLACE/native.tokens" "$PLACE/aarch64.tokens"
  echo "aarch64: the same tokens in the emulator"
}

mkdir -p "$PLACE"
native
if command -v qemu-aarch64 >/dev/null && apt-cache show python3-minimal:arm64 >/dev/null 2>&1; then
  aarch64
else
  echo "aarch64: not tried. It needs qemu-user, and dpkg --add-architecture arm64 && apt-get update"
fi
