#!/usr/bin/env bash
# Measures what including the library costs, in seconds of CPU time, best of three, and fails above
# the limits: 1.5 s over an empty file at -O0 for the umbrella header; at -O2 for the quick start 8 s
# with one instruction set and 25 s with all of them.
set -eu
cd "$(dirname "$0")/.."
cxx=${CXX:-c++}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

: >"$work/empty.cpp"
echo '#include <chunkattn/chunkattn.hpp>' >"$work/umbrella.cpp"
tools/quick_start.sh README.md >"$work/quick_start.cpp"

cpu_seconds() {  # cpu_seconds OPTIMISATION FILE [OPTION...]
  local best=999 optimisation=$1 file=$2
  shift 2
  for _ in 1 2 3; do
    TIMEFORMAT='%U %S'
    local t
    t=$({ time "$cxx" -std=c++20 "$optimisation" "$@" -I include -c "$work/$file.cpp" -o "$work/$file.o"; } 2>&1)
    best=$(awk -v t="$t" -v best="$best" 'BEGIN { split(t, a, " "); s = a[1] + a[2]; print s < best ? s : best }')
  done
  echo "$best"
}

empty=$(cpu_seconds -O0 empty)
umbrella=$(cpu_seconds -O0 umbrella)
one=$(cpu_seconds -O2 quick_start -DCHUNKATTN_ISA=portable)
all=$(cpu_seconds -O2 quick_start)
awk -v empty="$empty" -v umbrella="$umbrella" -v one="$one" -v all="$all" -v cxx="$cxx" 'BEGIN {
  printf "compile time with %s: umbrella header %.2f s over an empty file at -O0 (limit 1.5), ", cxx, umbrella - empty
  printf "quick start at -O2 %.2f s with one instruction set (limit 8), %.2f s with all (limit 25)\n", one, all
  if (umbrella - empty > 1.5 || one > 8 || all > 25) { print "FAILED: above the limit"; exit 1 }
}'
