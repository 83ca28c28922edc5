#!/usr/bin/env bash
# What needs an NVIDIA GPU, in parts that each end well within ten minutes on 16 cores:
#   gpu.sh pack      gather what a machine without a network lacks (header libraries, weights, trees)
#                    into .gpu-pack/
#   gpu.sh test      build and run the whole test suite: the host's, then the CUDA tests
#   gpu.sh sanitize  compute-sanitizer (memcheck, racecheck, initcheck, synccheck), reduced tests
#   gpu.sh bench     the sweep: one JSON lines file, one table
#   gpu.sh           test, sanitize, bench; finished parts are not run again (remove the output
#                    folder to start over)
# Needs nvcc and a host compiler. Output: ${OUT:-build/gpu}. Environment: CUDA_ARCH (default: the
# device's), NVCC, CHUNKATTN_SEED.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-build/gpu}
part=${1:-all}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}

pack() {
  local data=${CHUNKATTN_DATA:-../shared} dir file header found
  mkdir -p .gpu-pack/include
  for header in doctest/doctest.h nlohmann/json.hpp xxhash.h; do
    found=""
    for dir in /usr/include /usr/local/include ${HEADERS_DIR:-}; do
      [ -f "$dir/$header" ] || continue
      cp -R "$dir/${header%%/*}" .gpu-pack/include/
      found=yes
    done
    [ -n "$found" ] || { echo "$header not found: install it, or set HEADERS_DIR to the folder it is in" >&2; return 1; }
  done
  for file in models/stories260K.bin models/tok512.bin models/stories260K.prompts.json \
    models/stories260K.greedy.txt workloads/kernel_trees.json; do
    if [ -f "$data/$file" ]; then
      mkdir -p ".gpu-pack/data/$(dirname "$file")"
      cp "$data/$file" ".gpu-pack/data/$file"
    else
      echo "not packed, what needs it will be left out: $data/$file (set CHUNKATTN_DATA)"
    fi
  done
  echo "packed $(find .gpu-pack -type f | wc -l) files into .gpu-pack/ ($(du -sh .gpu-pack | cut -f1)); a copy of the tree with it is enough"
}

if [ "$part" = pack ]; then pack; exit; fi
case $part in all | test | sanitize | bench) ;; *) sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  echo "No NVIDIA GPU here. NOT checked: the CUDA kernels on hardware, compute-sanitizer, the sweep."
  echo "Checked elsewhere: the same kernels under tests/simt (ctest -R cuda), compiled code by"
  echo "tests/cuda/check_ptxas.py."
  exit 0
fi
[ -x "$nvcc" ] || { echo "nvcc not found: set NVCC" >&2; exit 1; }
mkdir -p "$out"
[ -n "${CHUNKATTN_DATA:-}" ] || [ ! -d .gpu-pack/data ] || export CHUNKATTN_DATA="$PWD/.gpu-pack/data"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/device.txt"
cap=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
arch=${CUDA_ARCH:-$cap}
[ "$arch" = 90 ] && arch=90a
flags=(-std=c++20 -O3 -lineinfo -Iinclude -Itests -I. -I.gpu-pack/include
  -gencode "arch=compute_$arch,code=sm_$arch" --threads 4)

build_tests() {
  [ -x "$out/cuda_gpu_test" ] && [ -z "$(find include tests/cuda tests/support -newer "$out/cuda_gpu_test" -type f -print -quit)" ] && return
  "$nvcc" "${flags[@]}" -o "$out/cuda_gpu_test" tests/cuda/cuda_gpu_test.cu tests/main.cpp
}
# The host's tests run here too: same sources, this machine's compiler.
run_host_tests() {
  local host=${CXX:-g++} jobs=(-P "$(nproc)") failed=0 program
  mkdir -p "$out/host"
  find tests -name '*_test.cpp' | xargs "${jobs[@]}" -I{} sh -c \
    '"$0" -std=c++20 -O2 -march=native -DCHUNKATTN_SOURCE_DIR="\"$PWD\"" \
      -DCHUNKATTN_BINARY_DIR="\"$(realpath "$1")\"" -Iinclude -Itests -I. -I.gpu-pack/include \
      "$2" tests/main.cpp -pthread -o "$1/host/$(basename "$2" .cpp)"' "$host" "$out" {} \
    || echo "some host tests did not compile" >&2
  : >"$out/host.txt"
  for program in "$out"/host/*_test; do
    echo "== $(basename "$program")"
    timeout 120 "$program" | tail -3 || failed=1
  done >"$out/host.txt" 2>&1
  cat "$out/host.txt"
  for program in $(find tests -name '*_test.cpp'); do
    [ -x "$out/host/$(basename "$program" .cpp)" ] || { echo "NOT compiled: $program"; failed=1; }
  done
  return $failed
}
run_test() {
  local failed=0
  run_host_tests || failed=1
  build_tests
  "$out/cuda_gpu_test" | tee "$out/test.txt" || failed=1
  return $failed
}
run_sanitize() {
  build_tests
  local tool sanitizer
  sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$nvcc")/compute-sanitizer")
  if [ ! -x "$sanitizer" ]; then echo "compute-sanitizer not found: NOT run" | tee "$out/sanitize.txt"; return; fi
  : >"$out/sanitize.txt"
  for tool in memcheck racecheck initcheck synccheck; do
    echo "== $tool"
    # The oracle on the host takes its time under no tool: a twentieth of the cases is enough here.
    CHUNKATTN_TEST_SCALE=0.05 timeout 140 "$sanitizer" --tool "$tool" --error-exitcode 9 \
      "$out/cuda_gpu_test" --test-case="kernels agree*,*graph*" 2>&1 | tail -15
    echo "exit ${PIPESTATUS[0]}"
  done | tee "$out/sanitize.txt"
  ! grep -Eq '^exit [^0]' "$out/sanitize.txt"
}
run_bench() {
  "$nvcc" "${flags[@]}" -o "$out/cuda_sweep" bench/cuda_sweep.cu
  "$out/cuda_sweep" "${SECONDS_PER_CASE:-0.3}" | tee "$out/sweep.jsonl"
  python3 - "$out/sweep.jsonl" <<'PY' | tee "$out/sweep.txt"
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
print(f"{'case':16} {'b':>4} {'heads':>6} {'shared':>7} {'own':>5} {'us':>9} {'floor':>9} {'of floor':>9}")
for r in rows:
    if "case" in r:
        print(f"{r['case']:16} {r['batch']:4} {r['qo_heads']:3}/{r['kv_heads']:<2} {r['shared']:7} "
              f"{r['private']:5} {r['us']:9.1f} {r['floor_us']:9.1f} {r['of_floor']:9.0%}")
PY
}

for step in test sanitize bench; do
  [ "$part" = all ] || [ "$part" = "$step" ] || continue
  if [ "$part" = all ] && [ -f "$out/$step.done" ]; then echo "== $step: done before"; continue; fi
  echo "== $step"
  "run_$step"
  date -u +%FT%TZ >"$out/$step.done"
done
