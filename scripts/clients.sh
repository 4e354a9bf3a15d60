#!/usr/bin/env bash
# Makes an environment for each client that tests/clients runs against the gateway: .clients/NAME.
#   scripts/clients.sh [NAME ...]     all of tests/clients/requirements when no name is given; about 10 GB together
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
names=("$@")
[ $# -gt 0 ] || for file in tests/clients/requirements/*.txt; do names+=("$(basename "$file" .txt)"); done
for name in "${names[@]}"; do
  list=tests/clients/requirements/$name.txt
  [ -f "$list" ] || { echo "no client named $name: $list does not exist" >&2; exit 1; }
  made=.clients/$name/.installed
  if [ -f "$made" ] && [ ! "$list" -nt "$made" ]; then continue; fi
  echo "making .clients/$name"
  "$python" -m venv ".clients/$name"
  options=()
  [ "$name" != templates ] || options=(--no-deps)  # only files of these packages are read
  ".clients/$name/bin/pip" install -q --disable-pip-version-check "${options[@]}" -r "$list"
  if [ "$name" = vllm ]; then
    ".clients/$name/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
  fi
  touch "$made"
done
