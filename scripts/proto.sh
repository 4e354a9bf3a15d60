#!/usr/bin/env bash
# Generates the stubs from proto/ into DIR (default: the repository itself).
# The generator lives in an environment of its own: grpcio-tools 1.82 and later emit protobuf-7 code
# that a protobuf-6 runtime refuses, and 1.81 cannot share an environment with protobuf 7.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-.}"
tools=.venv-proto
if [ ! -x "$tools/bin/python" ] || ! "$tools/bin/python" -c 'import grpc_tools' 2>/dev/null; then
  python3 -m venv "$tools"
  "$tools/bin/pip" install -q --disable-pip-version-check 'grpcio-tools==1.81.*' 2>&1 | grep -v '^WARNING: Location' >&2 || true
fi
"$tools/bin/python" -m grpc_tools.protoc -I proto \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  proto/pdserve/v1/*.proto
