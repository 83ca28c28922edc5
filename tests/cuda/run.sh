#!/usr/bin/env bash
# run.sh [kernels|some|wrappers|sass|mutants|programs WORK]: compiles the CUDA kernels, all that are tuned or some of
# them (check_ptxas.py), or each wrapper of ptx.cuh (check_sass.py), or some kernels for their machine code
# (check_kernels.py), and looks at what came out; or names the mutants of the kernels (mutate.py), none of whose kinds
# may be without a place in them; or compiles and links what tools/gpu.sh will run on a GPU, for one architecture, into
# WORK.
# Exit 0: passed. 77: a tool is missing, said aloud. Anything else: failed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

skip() { echo "SKIPPED: $*"; exit 77; }

if [ "${1:-kernels}" = mutants ]; then
  command -v python3 >/dev/null || skip "cuda mutants needs python3"
  exec python3 "$here/mutate.py" --list
fi
nvcc=${NVCC:-}
[ -x "$nvcc" ] || nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || skip "cuda compiled needs nvcc"
command -v python3 >/dev/null || skip "cuda compiled needs python3"
export NVCC=$nvcc
if [ "${1:-kernels}" = programs ]; then
  for header in fmt/core.h CLI/CLI.hpp utf8proc.h nlohmann/json.hpp doctest/doctest.h; do
    echo "#include <$header>" | "${CXX:-g++}" -x c++ -std=c++20 -E - >/dev/null 2>&1 || skip "cuda programs needs $header"
  done
  GPU_BUILD=$2 CUDA_ARCH=80 GPU_OPTIMISE=0 exec "$here/../../tools/gpu.sh" build
fi
case ${1:-kernels} in
  kernels) exec python3 "$here/check_ptxas.py" --tuned ;;
  sass) exec python3 "$here/check_kernels.py" ;;
  some) exec python3 "$here/check_ptxas.py" --quick --head-dim 128 ;;
  *) exec python3 "$here/check_sass.py" ;;
esac
