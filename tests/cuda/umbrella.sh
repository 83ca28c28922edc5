#!/usr/bin/env bash
# umbrella.sh [some]: compiles umbrella.cu for the oldest and the newest architecture that is supported, or, with the
# smallest kernels, for the newest alone; for the one that nvcc takes by default it says what is needed, and little else.
# Exit 0: passed. 77: a tool is missing, said aloud. Anything else: failed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

nvcc=${NVCC:-}
[ -x "$nvcc" ] || nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || { echo "SKIPPED: cuda umbrella needs nvcc"; exit 77; }
object=$(mktemp)
trap 'rm -f "$object" "$object.log"' EXIT
if "$nvcc" -std=c++20 -arch=sm_75 -I "$here/../../include" -c "$here/umbrella.cu" -o "$object" >"$object.log" 2>&1; then
  echo "FAILED: compiled for sm_75"
  exit 1
fi
if ! grep -q 'error.*chunkattn needs compute capability 8.0' "$object.log" || [ "$(grep -c error "$object.log")" -gt 4 ]; then
  head -n 20 "$object.log"
  echo "FAILED: $(grep -c error "$object.log") lines of errors for sm_75, not one that says what is needed"
  exit 1
fi
options=(-O2 -gencode arch=compute_80,code=sm_80)
[ "${1:-}" != some ] || options=(-O0 -DHEAD_DIM=16)
"$nvcc" -std=c++20 -Werror all-warnings -I "$here/../../include" \
  "${options[@]}" -gencode arch=compute_90a,code=sm_90a \
  -c "$here/umbrella.cu" -o "$object"
