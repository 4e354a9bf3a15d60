#!/usr/bin/env bash
# Makes an environment for each client that tests/clients runs against the gateway: .clients/NAME.
#   scripts/clients.sh [NAME ...]     all of tests/clients/requirements when no name is given; about 10 GB together
# A list NAME.txt is installed by pip, and a list NAME.npm (package@version) by npm.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
lists=tests/clients/requirements
names=("$@")
[ $# -gt 0 ] || for file in "$lists"/*.txt "$lists"/*.npm; do file=$(basename "$file"); names+=("${file%.*}"); done
for name in "${names[@]}"; do
  list=$lists/$name.txt
  [ -f "$list" ] || list=$lists/$name.npm
  [ -f "$list" ] || { echo "no client named $name: $lists has neither $name.txt nor $name.npm" >&2; exit 1; }
  made=.clients/$name/.installed
  if [ -f "$made" ] && [ ! "$list" -nt "$made" ]; then continue; fi
  if [ "${list##*.}" = npm ]; then
    if ! command -v npm > /dev/null; then echo "no npm here, so $name is left out" >&2; continue; fi
    echo "making .clients/$name"
    mkdir -p ".clients/$name"
    mapfile -t packages < "$list"
    npm install --prefix ".clients/$name" --no-audit --no-fund --no-package-lock --loglevel error "${packages[@]}"
  else
    echo "making .clients/$name"
    "$python" -m venv ".clients/$name"
    options=()
    [ "$name" != templates ] || options=(--no-deps)  # only files of these packages are read
    ".clients/$name/bin/pip" install -q --disable-pip-version-check "${options[@]}" -r "$list"
    if [ "$name" = vllm ]; then
      ".clients/$name/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
    fi
  fi
  touch "$made"
done
