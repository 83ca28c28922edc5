#!/usr/bin/env bash
# What needs an NVIDIA GPU, for a machine that is rented by the minute. docs/gpu.md has the order.
#   gpu.sh pack       gather what a bare machine lacks into .gpu-pack/: header libraries, weights,
#                     trees, and what lies in PEERS_DIR (wheels, FastTree-Artifact)
#   gpu.sh build      compile all programs into build/gpu, or into GPU_BUILD; needs nvcc, but no GPU
#   gpu.sh test       the CUDA tests; serve on the GPU beside the CPU               test.txt
#   gpu.sh sanitize   compute-sanitizer: memcheck, racecheck                        sanitize.txt
#   gpu.sh sanitize2  the same: initcheck, synccheck                                sanitize2.txt
#   gpu.sh bench      the sweep, a line of JSON per case, and a table               bench.txt
#   gpu.sh profile    Nsight Compute on four cases of it                            profile.txt
#   gpu.sh peers      other projects' kernels on the same cases                     peers.txt
#   gpu.sh            test to peers
#   gpu.sh once       all of these in smaller doses within one call of ten minutes (CALL_SECONDS, 570),
#                     what is worth most first
# Steps may be named in any order, alone or several. Each ends within nine minutes on 16 cores and
# leaves one file in OUT (default build/gpu/results), written as it goes. A part that fails does not
# stop the others.
# Environment: CUDA_ARCH (default: the device's, without one 90a), NVCC, CHUNKATTN_SEED, GPU_OPTIMISE
# (3; 0 compiles in two thirds of the time, for who asks only whether it compiles).
# Exit: 0 passed, 1 something failed or is missing, 2 bad arguments, 77 no GPU for these steps.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
build=${GPU_BUILD:-build/gpu}
out=${OUT:-$build/results}
level=${GPU_OPTIMISE:-3}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
all_steps="test sanitize sanitize2 bench profile peers"
failures=()

usage() { sed -n '2,22s/^# \{0,1\}//p' "$0" >&2; exit 2; }
failed() { failures+=("$*"); echo "FAILED: $*"; }

# --- what a bare machine lacks -----------------------------------------------------------------------

pack() {
  local data=${CHUNKATTN_DATA:-../shared} dir file header found
  rm -rf .gpu-pack
  mkdir -p .gpu-pack/include .gpu-pack/lib
  for header in doctest/doctest.h nlohmann/json.hpp fmt/core.h CLI/CLI.hpp utf8proc.h; do
    found=""
    for dir in ${HEADERS_DIR:-} /usr/local/include /usr/include; do
      [ -f "$dir/$header" ] || continue
      cp -R "$dir/${header%%/*}" .gpu-pack/include/
      found=yes
      break
    done
    [ -n "$found" ] || failed "pack: $header not found: install it, or set HEADERS_DIR to the folder it is in"
  done
  for file in /usr/lib/*/libutf8proc.a /usr/local/lib/libutf8proc.a; do
    if [ -f "$file" ]; then cp "$file" .gpu-pack/lib/; fi
  done
  for file in models/stories260K.bin models/tok512.bin models/stories260K.prompts.json \
    workloads/kernel_trees.json; do
    if [ -f "$data/$file" ]; then
      mkdir -p ".gpu-pack/data/$(dirname "$file")"
      cp "$data/$file" ".gpu-pack/data/$file"
    else
      echo "not packed, what needs it will be left out: $data/$file (set CHUNKATTN_DATA)"
    fi
  done
  if [ -d "${PEERS_DIR:-}" ]; then cp -R "$PEERS_DIR" .gpu-pack/peers; fi
  echo "packed $(find .gpu-pack -type f | wc -l) files into .gpu-pack/ ($(du -sh .gpu-pack | cut -f1))"
}

# --- programs, compiled once for the sources as they are ---------------------------------------------

includes=(-Iinclude -Itests -I. -Iexamples/serve -I.gpu-pack/include)
flags=(-std=c++20 -O"$level" -Xptxas -O"$level" -lineinfo "${includes[@]}")
inputs() { find include tests/cuda tests/support tests/main.cpp bench examples -type f -print0 | sort -z | xargs -0 sha256sum; }

# program NAME: compiles it unless build/gpu has it for these sources and this architecture. One that
# was compiled on another machine is taken as it is.
program() {
  local name=$1 stamp
  stamp="sm_$arch -O$level $sources"
  [ -x "$build/$name" ] && [ "$(cat "$build/$name.stamp" 2>/dev/null)" = "$stamp" ] && return
  if [ ! -x "$nvcc" ]; then failed "$name: not built, nvcc not found (set NVCC)"; return 1; fi
  echo "compiling $name for sm_$arch"
  rm -f "$build/$name.stamp"
  if ! "compile_$name" "$build/$name" -gencode "arch=compute_$arch,code=sm_$arch" --split-compile 0 \
    >"$build/$name.log" 2>&1; then
    tail -n 20 "$build/$name.log"
    failed "$name: does not compile"
    return 1
  fi
  echo "$stamp" >"$build/$name.stamp"
  "$nvcc" --version | sed -n 's/.*release \([0-9]*\).*/\1/p' >"$build/toolkit"  # its major version
}
compile_cuda_gpu_test() { "$nvcc" "${flags[@]}" "${@:2}" -o "$1" tests/cuda/cuda_gpu_test.cu tests/main.cpp; }
compile_cuda_sweep() { "$nvcc" "${flags[@]}" "${@:2}" -o "$1" bench/cuda_sweep.cu; }
# By hand and with static libraries, so that it runs where nothing is installed.
compile_serve() {
  local objects=$build/serve.o
  local with_cuda=-DCHUNKATTN_EXAMPLES_CUDA  # for both compilers: they share a header
  rm -rf "$objects"
  mkdir -p "$objects"
  find examples/serve -name '*.cpp' ! -path '*/tests/*' ! -path '*/server/*' ! -name run.cpp \
    ! -name products_onednn.cpp ! -name mpi_ranks.cpp -print0 |
    xargs -0 -P "$(nproc)" -I{} sh -c '"$@" -c -o "$0/$(echo {} | tr / _).o" {}' "$objects" \
      "${CXX:-g++}" -std=c++20 -O"$level" -march=x86-64-v3 -DFMT_HEADER_ONLY "$with_cuda" "${includes[@]}" || return
  "$nvcc" "${flags[@]}" "$with_cuda" "${@:2}" -o "$1" examples/support/cuda_attention.cu "$objects"/*.o -L.gpu-pack/lib -lutf8proc
}

# --- steps -------------------------------------------------------------------------------------------

# part NAME SECONDS COMMAND...: runs it, its output goes to the step's file and here. Where there is a
# deadline, a third of its time is enough.
part() {
  local name=$1 seconds=$2 status left
  shift 2
  echo "== $name"
  if [ "$deadline" -gt 0 ]; then
    left=$((deadline - SECONDS)) seconds=$((seconds / 3))
    if [ $left -lt $seconds ]; then seconds=$left; fi
    if [ $seconds -lt 10 ]; then failed "$name: left out, the time is up"; return; fi
  fi
  timeout -k 5 "$seconds" "$@" 2>&1 | head -c 1500000 | tee "$build/part.txt"
  status=${PIPESTATUS[0]}
  [ "$status" = 124 ] && failed "$name: not done within $seconds s" && return
  if grep -q ERR_NVGPUCTRPERM "$build/part.txt"; then  # the machine's owner keeps its counters
    echo "$name: NOT profiled, ncu is not permitted to read counters here"
    return
  fi
  [ "$status" = 0 ] || failed "$name: exit $status"
}

run_test() {
  program cuda_gpu_test && part "CUDA tests" 240 env "CHUNKATTN_TEST_SCALE=$scale" "$build/cuda_gpu_test" && run_shared
  if [ ! -f "$data/models/stories260K.bin" ]; then failed "serve: no weights, see gpu.sh pack"; return; fi
  program serve && part "serve, logits as on the CPU" 120 "$build/serve" generate --device cuda \
    --model "$data/models/stories260K.bin" --tokenizer "$data/models/tok512.bin" \
    --prompts "$data/models/stories260K.prompts.json" --check
}
# Two processes that share the device by MPS, each with a part of its multiprocessors.
run_shared() {
  if ! command -v nvidia-cuda-mps-control >/dev/null; then echo "MPS: NOT run, no nvidia-cuda-mps-control"; return; fi
  part "two processes by MPS" 60 env CHUNKATTN_TEST_SCALE=0.05 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40 bash -c '
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    trap "echo quit | nvidia-cuda-mps-control; rm -rf $CUDA_MPS_PIPE_DIRECTORY" EXIT
    nvidia-cuda-mps-control -d || exit
    "$@" & one=$!
    "$@"; other=$?
    wait $one && exit $other' _ "$build/cuda_gpu_test" "--test-case=kernels agree*,*graph*"
}
run_sanitizers() {
  local tool sanitizer
  sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$nvcc")/compute-sanitizer")
  if [ ! -x "$sanitizer" ]; then failed "compute-sanitizer not found"; return; fi
  program cuda_gpu_test || return
  for tool in "$@"; do  # few cases: these tools are slow, and the oracle on the host is not their business
    part "$tool" 250 env CHUNKATTN_TEST_SCALE=0.05 "$sanitizer" --tool "$tool" --error-exitcode 9 \
      "$build/cuda_gpu_test" "--test-case=kernels agree*,*graph*"
  done
}
run_sanitize() { run_sanitizers memcheck racecheck; }
run_sanitize2() { run_sanitizers initcheck synccheck; }
run_bench() {
  program cuda_sweep || return
  part "sweep" 480 "$build/cuda_sweep" "${SECONDS_PER_CASE:-$seconds_per_case}"
  sed -n 's/^{"case": "\([^"]*\)".* "us": \([0-9.]*\), "floor_us": \([0-9.]*\),.*/\1|\2|\3/p' "$build/part.txt" |
    awk -F'|' 'BEGIN { printf "%-34s %9s %9s %9s\n", "case", "us", "floor", "of floor" }
               { printf "%-34s %9.1f %9.1f %8.0f%%\n", $1, $2, $3, 100 * $3 / $2 }'
}
profiled=("b 32 32/32 4096+64" "b 32 32/32 4096+512" "b 256 32/8 4096+512" "b 32 32/32 0+4096")
run_profile() {
  local ncu name
  ncu=$(command -v ncu || echo "$(dirname "$nvcc")/ncu")
  if [ ! -x "$ncu" ]; then failed "ncu not found"; return; fi
  program cuda_sweep || return
  for name in "${profiled[@]}"; do
    part "$name" 120 "$ncu" --set full --clock-control none --kernel-name "regex:attention_kernel" \
      --launch-count 1 "$build/cuda_sweep" 0 "$name"
  done
}
run_peers() {
  local python=${PYTHON:-python3} wheels=(.gpu-pack/peers/*.whl)
  if ! "$python" -c "import torch" 2>/dev/null; then failed "peers: $python has no PyTorch (set PYTHON)"; return; fi
  if [ -f "${wheels[0]}" ]; then  # one by one: one that does not fit this machine keeps no other away
    part "wheels" 60 bash -c 'status=0; for wheel in "${@:3}"; do
      "$1" -m pip install -q --no-index --no-deps --upgrade --target "$2" "$wheel" || status=1; done; exit $status' \
      _ "$python" "$build/site" "${wheels[@]}"
  fi
  part "peers" 460 env PYTHONPATH="$build/site" FASTTREE=.gpu-pack/peers/FastTree-Artifact/kernel_bench \
    "$python" bench/peers/gpu_peers.py --seconds "$peer_seconds"
}

# --- arguments ---------------------------------------------------------------------------------------

steps=${*:-$all_steps}
deadline=0 scale=1 seconds_per_case=0.3 peer_seconds=400
if [ "$steps" = once ]; then
  deadline=${CALL_SECONDS:-570} scale=0.3 seconds_per_case=0.05 peer_seconds=120
  steps="test sanitize bench profile peers sanitize2"
fi
for step in $steps; do
  case " pack build $all_steps " in *" $step "*) ;; *) echo "gpu.sh: unknown step '$step'" >&2; usage ;; esac
done
data=${CHUNKATTN_DATA:-../shared}
[ ! -d .gpu-pack/data ] || data=.gpu-pack/data
export CHUNKATTN_DATA=$data
mkdir -p "$build"
# nvidia-smi numbers devices by their bus, programs by their speed unless told otherwise.
export CUDA_DEVICE_ORDER=PCI_BUS_ID
device=$(nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "${CUDA_VISIBLE_DEVICES%%,*}"} --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
cap=$(echo "${device##*, }" | tr -d .)
arch=${CUDA_ARCH:-${cap:-90}}
[ "$arch" = 90 ] && arch=90a
sources=$(inputs | sha256sum | cut -d' ' -f1)
lacking=0

# A program fails at its first call (error 35) where its toolkit's major version is newer than the driver's.
toolkit() { cat "$build/toolkit" 2>/dev/null || "$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\).*/\1/p'; }
if [ -n "$device" ]; then
  driver=$(echo "$device" | cut -d, -f2 | tr -d ' ')
  needs=$(toolkit)
  case $needs in 12) least=525 ;; 13) least=580 ;; *) least=0 ;; esac
  case " $steps " in *" pack "* | *" build "*) least=0 ;; esac
  if [ "${driver%%.*}" -lt "$least" ]; then
    echo "gpu.sh: the driver is $driver, programs of CUDA $needs need $least or newer: install it, or an older toolkit"
    exit 1
  fi
fi

for step in $steps; do
  if [ "$step" = pack ]; then pack; continue; fi
  if [ "$step" = build ]; then
    for name in cuda_gpu_test cuda_sweep serve; do program "$name"; done
    continue
  fi
  if [ -z "$device" ]; then
    echo "$step: NOT run, no NVIDIA GPU here"
    lacking=1
    continue
  fi
  mkdir -p "$out"
  echo "==== $step"
  start=$SECONDS
  exec 3>&1 > >(tee "$out/$step.txt")
  tee_pid=$!
  echo "# $(date -u +%FT%TZ) $device, sm_$arch, sources ${sources:0:12}"
  "run_$step"
  echo "# $step took $((SECONDS - start)) s"
  exec >&3 3>&-
  wait "$tee_pid"
done

if [ ${#failures[@]} -gt 0 ]; then
  echo "FAILED, ${#failures[@]}:"
  printf '  %s\n' "${failures[@]}"
  exit 1
fi
if [ $lacking = 1 ]; then
  echo "Checked without a GPU: the same kernels under tests/simt (ctest -R cuda), compiled code by"
  echo "tests/cuda/check_ptxas.py."
  exit 77
fi
