#!/usr/bin/env bash
# The committed stubs are what proto/ generates, and they load under protobuf 6 and under protobuf 7.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
mkdir -p "$fresh/pdserve/v1"
scripts/proto.sh "$fresh"
if ! diff -r -x '__init__.py' -x '__pycache__' "$fresh/pdserve/v1" pdserve/v1; then
  echo "stubs differ from proto/: run make proto" >&2
  exit 1
fi
load='
import google.protobuf
import pdserve.v1.cluster_pb2_grpc, pdserve.v1.inference_pb2_grpc, pdserve.v1.transfer_pb2_grpc, pdserve.v1.worker_pb2_grpc
print("stubs load under protobuf", google.protobuf.__version__)
'
six=$(.venv-proto/bin/python -c "$load")
seven=$(.venv/bin/python -c "$load")
echo "$six"; echo "$seven"
case "$six" in *" 6."*) ;; *) echo "the generator's environment does not hold protobuf 6" >&2; exit 1 ;; esac
case "$seven" in *" 7."*) ;; *) echo ".venv does not hold protobuf 7" >&2; exit 1 ;; esac
