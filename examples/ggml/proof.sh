#!/usr/bin/env bash
# proof.sh FOLDER [quick]: stock llama.cpp with and without the plugin.
#
# Fetches llama.cpp's source (with the source package of llama-cpp-python, a pinned version), builds what is
# needed of it and the plugin into FOLDER (first for the oldest ggml that it supports, which is only compiled), and
# runs llama.cpp's own programs: its test of FLASH_ATTN_EXT, and
# texts of a real model, which must be the same with the plugin as without. `quick` leaves texts out, and most
# sizes of heads.
#
# LLAMA_CPP_DIR and LLAMA_CPP_BUILD name a source and a build that are there already; MODEL is the GGUF file
# whose texts are compared. Exit 77: the source could not be fetched.
set -euo pipefail
folder=$(realpath -m "$1")
quick=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
version=0.3.36
oldest=0.3.24  # ggml 0.13.1, as in CMakeLists.txt
heads="40;64;72;80;96;128;192;256;64:72;72:64;96:64;192:128"
[ -z "$quick" ] || heads="64;128"
jobs=${JOBS:-$(nproc 2>/dev/null || echo 2)}
mkdir -p "$folder"

say() { printf '\n==> %s\n' "$*"; }
fail() { printf '\nFAILED: %s\n' "$*" >&2; exit 1; }
logged() {  # logged NAME COMMAND...: its output goes to FOLDER/NAME.log, which is shown if it fails
  local log=$folder/$1.log
  "${@:2}" >"$log" 2>&1 || { tail -40 "$log"; fail "$1 (all of it: $log)"; }
}

instruction_sets() {  # options of ggml for this processor
  local name
  if [ "$(uname -m)" != x86_64 ]; then
    echo -DGGML_CPU_ALL_VARIANTS=ON
    return
  fi
  for name in avx:AVX avx2:AVX2 fma:FMA f16c:F16C bmi2:BMI2 avx_vnni:AVX_VNNI avx512bw:AVX512 avx512vbmi:AVX512_VBMI \
    avx512_vnni:AVX512_VNNI avx512_bf16:AVX512_BF16 amx_tile:AMX_TILE amx_int8:AMX_INT8 amx_bf16:AMX_BF16; do
    if grep -qw "${name%:*}" /proc/cpuinfo; then echo "-DGGML_${name#*:}=ON"; fi
  done
}

# --- llama.cpp ---------------------------------------------------------------------------------------

fetch() {  # fetch VERSION of llama-cpp-python
  say "fetching llama.cpp with llama-cpp-python $1"
  { python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" download -q --no-deps --no-binary llama-cpp-python \
    -d "$folder" "llama-cpp-python==$1" && tar -xzf "$folder/llama_cpp_python-$1.tar.gz" -C "$folder"; } \
    >"$folder/download.log" 2>&1
}

source=${LLAMA_CPP_DIR:-$folder/llama_cpp_python-$version/vendor/llama.cpp}
build=${LLAMA_CPP_BUILD:-$folder/llama.cpp}
if [ ! -e "$source/ggml/src/ggml-backend-impl.h" ]; then
  fetch $version || { echo "SKIPPED: the source of llama-cpp-python could not be fetched: $(tail -1 "$folder/download.log")"; exit 77; }
fi
programs="test-backend-ops llama-completion llama-batched-bench llama-server llama-quantize"
[ -z "$quick" ] || programs=test-backend-ops
if [ -z "${LLAMA_CPP_BUILD:-}" ]; then
  say "building llama.cpp: $programs (some ten minutes on two cores)"
  generator=()
  if [ ! -e "$build/CMakeCache.txt" ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
  # Backends are loaded in such builds only, which know this machine by what they are given of it.
  logged configure_llama cmake -S "$source" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
    -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF $(instruction_sets) \
    -DLLAMA_CURL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
  logged build_llama cmake --build "$build" -j "$jobs" --target $programs
fi

# --- the plugin --------------------------------------------------------------------------------------

generator=()
if [ ! -e "$folder/plugin/CMakeCache.txt" ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
build_plugin() {  # build_plugin NAME SOURCE BUILD; what another ggml left is compiled again, kernels are not
  say "building the plugin for $1"
  logged configure_plugin cmake -S "$here" -B "$folder/plugin" "${generator[@]}" -DLLAMA_CPP_DIR="$2" \
    -DLLAMA_CPP_BUILD="$3" -DCHUNKATTN_GGML_HEAD_DIMS="$heads" -DCMAKE_CXX_COMPILER="${CXX:-c++}"
  logged build_plugin cmake --build "$folder/plugin" -j "$jobs"
}
old=$folder/llama_cpp_python-$oldest/vendor/llama.cpp
if [ -e "$old/ggml/src/ggml-backend-impl.h" ] || fetch $oldest; then
  build_plugin "the oldest ggml" "$old" ""
else
  echo "the oldest ggml: SKIPPED: it could not be fetched: $(tail -1 "$folder/download.log")"
fi
build_plugin "this ggml" "$source" "$build"
plugin=$folder/plugin/libggml-chunkattn.so
with() { GGML_BACKEND_PATH=$plugin "$@"; }

# --- its results -------------------------------------------------------------------------------------

say "llama.cpp's test of FLASH_ATTN_EXT"
with "$build/bin/test-backend-ops" test -o FLASH_ATTN_EXT -b chunkattn >"$folder/test_backend_ops.log" 2>&1 || true
python3 "$here/check/backend_ops.py" "$folder/test_backend_ops.log" --heads "$heads"

say "the plugin beside ggml's own code"
"$folder/plugin/check_attention" "$plugin" --rounds 1 --quick 2>/dev/null

say "layers of one graph: a mask is read once, and again when it may have changed"
most=3  # per cent of attention's time that plans may take: in the best of some runs, beside other work
for ((round = 1; ; ++round)); do
  CHUNKATTN_GGML_STATISTICS=1 "$folder/plugin/check_layers" "$plugin" >"$folder/layers.log" 2>&1 ||
    { cat "$folder/layers.log"; fail "check_layers"; }
  percent=$(sed -nE 's/.*plans ([0-9.]+) ms, attention ([0-9.]+) ms.*/\1 \2/p' "$folder/layers.log" | awk '{print 100 * $1 / $2}')
  grep NMSE "$folder/layers.log"
  echo "plans took ${percent:?no statistics} % of attention's time"
  awk "BEGIN {exit !($percent <= $most)}" && break
  [ $round -lt 5 ] || fail "plans may take $most %"
done

say "faults: llama.cpp continues without, and says so"
bash "$here/check/faults.sh" "$build/bin/test-backend-ops" "$plugin" "$folder/faults"

if [ -z "$quick" ]; then
  say "texts"
  logged dequantise "$build/bin/llama-quantize" --allow-requantize \
    "${MODEL:?a GGUF file whose texts are to be compared}" "$folder/model.f32.gguf" F32
  python3 "$here/check/texts.py" "$build/bin" "$plugin" "$folder/model.f32.gguf" --folder "$folder"
fi
say "all is well"
