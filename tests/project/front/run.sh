#!/usr/bin/env bash
# run.sh cpu|cuda|time WORK: a program of several units, of which one for each backend compiles kernels
# (make_attention) and the others see none (any_attention.hpp). cuda: one unit by nvcc for one
# architecture, linked to the .cpp files that call it. time: what the units cost a compiler beside the
# quick start, in CPU time, best of three.
# Exit 0: passed. 77: a tool is missing, said aloud. Anything else: failed.
set -euo pipefail
backend=$1 work=$2
root=$(cd "$(dirname "$0")/../../.." && pwd)
here=$root/tests/project/front
cxx=${CXX:-c++}
rm -rf "$work"
mkdir -p "$work"
cd "$work"
fail() { echo "FAILED: $*"; exit 1; }
warnings="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror"
# shellcheck disable=SC2086
compile() { "$cxx" -std=c++20 -Og $warnings -I "$root/include" "$@"; }

if [ "$backend" = time ]; then
  "$root/tools/quick_start.sh" "$root/README.md" >quick_start.cpp
  cp "$here"/*.cpp "$here"/*.hpp .
  declare -A best=()
  for _ in 1 2 3; do
    for unit in quick_start caller layer cpu_unit; do
      TIMEFORMAT='%U %S'
      seconds=$({ time "$cxx" -std=c++20 -O2 -I "$root/include" -c "$unit.cpp" -o "$unit.o"; } 2>&1)
      best[$unit]=$(awk -v t="$seconds" -v best="${best[$unit]:-1e9}" \
        'BEGIN { split(t, a, " "); s = a[1] + a[2]; print s < best ? s : best }')
    done
  done
  for unit in quick_start caller layer cpu_unit; do
    awk -v unit="$unit" -v s="${best[$unit]}" -v all="${best[quick_start]}" \
      'BEGIN { printf "%-12s %6.2f s  %.2f of the quick start\n", unit, s, s / all }'
  done
  exit
fi

# Kernels, intrinsics or CUDA's headers that a unit includes.
backends_in() { compile -M "$@" | grep -oE '[^ ]*(chunkattn/(cpu|cuda)/|[a-z]*mmintrin|arm_neon|cuda_runtime)[^ ]*' || true; }
[ -n "$(backends_in "$here/cpu_unit.cpp")" ] || fail "the unit with the kernels includes none"
for unit in caller layer; do
  included=$(backends_in -DWITH_CUDA "$here/$unit.cpp")
  [ -z "$included" ] || fail "$unit.cpp includes"$'\n'"$included"
done

flags=() objects=(caller.o layer.o cpu_unit.o) libraries=(-pthread)
if [ "$backend" = cuda ]; then
  nvcc=${NVCC:-}
  [ -x "$nvcc" ] || nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  [ -x "$nvcc" ] || { echo "SKIPPED: front cuda needs nvcc"; exit 77; }
  "$nvcc" -std=c++20 -O1 -arch=sm_80 -Werror all-warnings -I "$root/include" -c "$here/cuda_unit.cu" -o cuda_unit.o
  flags=(-DWITH_CUDA) objects+=(cuda_unit.o)
  libraries+=("-L$(dirname "$(readlink -f "$nvcc")")/../lib64" -lcudart_static -ldl -lrt)
fi
compile -DCHUNKATTN_ISA=native -c "$here/cpu_unit.cpp" -o cpu_unit.o  # one instruction set is enough here
compile "${flags[@]}" -c "$here/caller.cpp" -o caller.o
compile "${flags[@]}" -c "$here/layer.cpp" -o layer.o
compile "${objects[@]}" -o program "${libraries[@]}"
./program || fail "the program leaves with $?"
[ -z "$(nm -C caller.o layer.o | grep -E 'chunkattn::[a-z0-9_:]*(cpu|detail::cuda)::')" ] ||
  fail "there is something of a backend in units that only call"
echo "front $backend: one unit for each backend has kernels, the others have none"
