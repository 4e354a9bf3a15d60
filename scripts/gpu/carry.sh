#!/usr/bin/env bash
# Fills .carry/, which travels to a borrowed GPU beside the tree: name it in the call that runs first.sh, second.sh or
# third.sh. git ignores it by .git/info/exclude.
#
#   scripts/gpu/carry.sh
#
# .carry/wheels             grpcio and protobuf for Python 3.12, for a machine whose own are too old for the stubs
# .carry/triton-cache.tar.xz   kernels compiled for sm_90 by the Triton of .venv-gpu (make gpu-rehearsal makes it); a
#                           machine with another Triton compiles them itself, which takes about a minute
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv-gpu/bin/python
mkdir -p .carry
exclude="$(git rev-parse --git-path info/exclude)"
mkdir -p "$(dirname "$exclude")"
grep -qxF /.carry/ "$exclude" 2>/dev/null || echo /.carry/ >>"$exclude"

rm -rf .carry/wheels
pins=$(sed -n -E '/^(grpcio|protobuf)==/p' constraints.txt)
# shellcheck disable=SC2086
"$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64 -d .carry/wheels $pins

if [ ! -e .carry/triton-cache.tar.xz ] || [ -n "$(find pdserve/engine/gpu tests/gpu -name '*.py' -newer .carry/triton-cache.tar.xz)" ]; then
  cache="$(mktemp -d)"
  trap 'rm -rf "$cache"' EXIT
  TRITON_CACHE_DIR="$cache" "$python" -m tests.gpu.compile_kernels --cases >/dev/null
  tar -cJf .carry/triton-cache.tar.xz -C "$cache" .
fi
du -h .carry/wheels/* .carry/triton-cache.tar.xz
