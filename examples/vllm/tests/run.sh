#!/usr/bin/env bash
# run.sh WORK: the plugin for vLLM without vLLM: its library with one kernel, its Python over stand-ins.
# Exit 77: there is no python3.
set -euo pipefail
mkdir -p "$1"
work=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
plugin=$(dirname "$here")
root=$(cd "$plugin/../.." && pwd)
command -v python3 >/dev/null || { echo "SKIPPED: tests of the plugin for vLLM: no python3"; exit 77; }

rm -rf "$work/site"
mkdir -p "$work/site"
cp -r "$plugin/chunkattn_vllm" "$work/site"
cat >"$work/library.cpp" <<'END'
#define CHUNKATTN_C_KERNELS(X) X(16, 16, float, float)
#include <chunkattn/c/chunkattn.ipp>
END
"${CXX:-c++}" -std=c++20 -Og -fPIC -shared -fvisibility=hidden -DCHUNKATTN_ISA=native -I "$root/include" \
  "$work/library.cpp" -o "$work/site/chunkattn_vllm/libchunkattn_vllm.so" -pthread -ldl
cd "$here"
PYTHONPATH=$work/site PYTHONDONTWRITEBYTECODE=1 python3 test_adapter.py
