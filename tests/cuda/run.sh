#!/usr/bin/env bash
# run.sh: compiles the CUDA kernels and looks at what came out (check_ptxas.py).
# Exit 0: passed. 77: a tool is missing, said aloud. Anything else: failed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

skip() { echo "SKIPPED: $*"; exit 77; }

nvcc=${NVCC:-}
[ -x "$nvcc" ] || nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || skip "cuda compiled needs nvcc"
command -v python3 >/dev/null || skip "cuda compiled needs python3"
NVCC=$nvcc exec python3 "$here/check_ptxas.py" --tuned
