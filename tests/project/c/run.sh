#!/usr/bin/env bash
# run.sh WORK: the C interface as its users have it: a shared library, made of one source file and of two,
# called by a program of a C compiler and by Python's ctypes (examples/c).
# Exit 0: passed. 77: a tool is missing, said aloud. Anything else: failed.
set -euo pipefail
work=$1
root=$(cd "$(dirname "$0")/../../.." && pwd)
here=$root/examples/c
cxx=${CXX:-c++} cc=${CC:-cc}
rm -rf "$work"
mkdir -p "$work"
cd "$work"
fail() { echo "FAILED: $*"; exit 1; }
strict="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror"
# shellcheck disable=SC2086
compile() { "$cxx" -std=c++20 -Og -fPIC -fvisibility=hidden $strict -DCHUNKATTN_ISA=native -I "$root/include" "$@"; }

compile -shared "$here/kernels.cpp" -o libone.so -pthread

# The same in two files: kernels, and functions that compile none.
echo '#include <chunkattn/c/kernels.ipp>
CHUNKATTN_C_KERNEL(64, 64, float, float)' >kernel.cpp
{ echo '#define CHUNKATTN_C_EXTERN_KERNELS'; cat "$here/kernels.cpp"; } >functions.cpp
compile -c kernel.cpp -o kernel.o
compile -c functions.cpp -o functions.o
if nm -C functions.o | grep -q 'SequenceFirst\|sequence_first'; then fail "functions.cpp compiles kernels"; fi
"$cxx" -shared functions.o kernel.o -o libtwo.so -pthread

# C99, and C++ that includes the header twice.
"$cc" -std=c99 -Wall -Wextra -Wpedantic -Werror -I "$root/include" -c "$here/attend.c" -o attend.o
echo '#include <chunkattn/c/chunkattn.h>
#include <chunkattn/c/chunkattn.h>
int version() { return chunkattn_c_version(); }' >twice.cpp
"$cxx" -std=c++11 $strict -I "$root/include" -c twice.cpp -o twice.o
for library in one two; do
  nm -D --defined-only lib$library.so | awk '$2 == "T" { print $3 }' | sort >exported
  sed -nE 's/^.*\b(chunkattn_[a-z_]+)\(.*$/\1/p' "$root/include/chunkattn/c/chunkattn.h" |
    grep -v '_stride$' | sort -u >declared
  diff declared exported || fail "lib$library.so exports something else than chunkattn.h declares"
  "$cc" attend.o -L. -l$library -Wl,-rpath,"$PWD" -lm -o attend
  ./attend >attend.log || { cat attend.log; fail "attend.c with lib$library.so"; }
  grep -q '^5 pages are read, not 8$' attend.log || { cat attend.log; fail "attend.c shares nothing"; }
  if command -v python3 >/dev/null; then
    python3 "$here/attend.py" "$PWD/lib$library.so" || fail "attend.py with lib$library.so"
  else
    echo "without: attend.py needs python3"
  fi
done
cat attend.log
