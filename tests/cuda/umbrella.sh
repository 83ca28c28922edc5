#!/usr/bin/env bash
# umbrella.sh: compiles umbrella.cu for the oldest and the newest architecture that is supported.
# Exit 0: passed. 77: a tool is missing, said aloud. Anything else: failed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

nvcc=${NVCC:-}
[ -x "$nvcc" ] || nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || { echo "SKIPPED: cuda umbrella needs nvcc"; exit 77; }
object=$(mktemp)
trap 'rm -f "$object"' EXIT
"$nvcc" -std=c++20 -O2 -Werror all-warnings -I "$here/../../include" \
  -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a \
  -c "$here/umbrella.cu" -o "$object"
