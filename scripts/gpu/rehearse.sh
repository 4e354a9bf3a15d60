#!/usr/bin/env bash
# Rehearses first.sh to fourth.sh on a CPU in .venv-gpu, and checks what travels. `make gpu-rehearsal` runs it.
set -euo pipefail
cd "$(dirname "$0")/../.."
most_mib=56
python="$PWD/.venv-gpu/bin/python"

absent="redis ray llguidance opentelemetry"
for package in $absent; do
  if "$python" -c "import $package" 2>/dev/null; then
    echo "$package is in .venv-gpu, but not on the GPU machine: make clean, then again" >&2
    exit 1
  fi
done
"$python" -c 'import sys, torch, triton; print(sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)'

scripts/gpu/carry.sh
# Tracked files, others that git does not ignore, and .carry.
bytes=$( (git ls-files -z --cached --others --exclude-standard && find .carry -type f -print0) |
  xargs -0 stat -c %s 2>/dev/null | awk '{ total += $1 } END { print total }')
echo "the tree that travels: $((bytes / 1048576)) MiB, at most $most_mib"
if [ "$bytes" -ge $((most_mib * 1048576)) ]; then
  echo "too large: see git ls-files --others --exclude-standard and .carry" >&2
  exit 1
fi

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
# A machine whose grpcio is too old: setup must install the one of .carry. Only its metadata is a stand-in.
mkdir -p "$work/old/grpcio-1.60.0.dist-info"
printf 'Metadata-Version: 2.1\nName: grpcio\nVersion: 1.60.0\n' >"$work/old/grpcio-1.60.0.dist-info/METADATA"

red=""
for script in first second third fourth; do
  out="$work/$script"
  mkdir "$out"
  env -i PATH="$PATH" HOME="$HOME" OMP_NUM_THREADS=1 PYTHONPATH="$work/old" STATE="$work/state" OUT="$out" REHEARSE=1 \
    PYTHON="$python" "scripts/gpu/$script.sh" >"$work/$script.txt" 2>&1 || red="$red $script.sh"
  sed -n '/^# What came out/,$p' "$work/$script.txt"
  count=$(find "$out" -type f | wc -l)
  if [ "$count" -gt 8 ]; then
    echo "$script.sh leaves $count files: 8 come back" >&2
    red="$red $script.sh"
  fi
  if [ "$(tail -c 12000 "$work/$script.txt" | grep -c '^# What came out')" = 0 ]; then
    echo "the summary of $script.sh is longer than the 12,000 characters that come back" >&2
    red="$red $script.sh"
  fi
  if [ "$script" = first ]; then
    grep -q '^installing grpcio' "$work/first.txt" || { echo "an old grpcio was not replaced" >&2; red="$red setup"; }
    ! grep -q 'grpcio 1.60' "$work/first.txt" || { echo "an old grpcio is still used" >&2; red="$red setup"; }
  fi
  if grep -q '^skipped' "$work/$script.txt"; then
    red="$red $script.sh"
  fi
done
if [ -n "$red" ]; then
  echo "not green:$red" >&2
  for script in first second third fourth; do tail -n 200 "$work/$script.txt"; done
  exit 1
fi
echo "all parts are green"
