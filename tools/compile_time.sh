#!/usr/bin/env bash
# Measures what including the library costs to compile, as a multiple of a fixed unit of the standard
# library (compile_time_unit.cpp, at -O2) that the same compiler compiles in the same run, so that it says
# the same on any processor. Counts instructions where perf can, else seconds of CPU time; the best of
# three rounds. Fails above the limits: 0.7 for the umbrella header over an empty file at -O0, 0.3 for
# prefix_tree.hpp alone; for the
# quick start at -O2 3.2 with one instruction set, 6 with all of them, and 2.2 where the kernels are
# compiled elsewhere (CHUNKATTN_EXTERN_KERNELS).
set -eu
cd "$(dirname "$0")/.."
cxx=${CXX:-c++}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

: >"$work/empty.cpp"
echo '#include <chunkattn/chunkattn.hpp>' >"$work/umbrella.cpp"
echo '#include <chunkattn/prefix_tree.hpp>' >"$work/tree.cpp"
tools/quick_start.sh README.md >"$work/quick_start.cpp"

instructions() {  # instructions COMMAND...: nothing where they cannot be counted
  perf stat -x, -e instructions:u -o "$work/perf" -- "$@" >"$work/said" 2>&1 &&
    awk -F, '$1 ~ /^[0-9]+$/ && $1 > 0 { print $1; exit }' "$work/perf"
}
unit=seconds
if command -v perf >/dev/null && [ -n "$(instructions true || true)" ]; then unit=instructions; fi

cost() {  # cost COMMAND...: what it says is shown only if it fails
  local TIMEFORMAT='%U %S'
  if [ $unit = instructions ]; then
    instructions "$@"
  else
    { time "$@" >"$work/said" 2>&1; } 2>"$work/time" || return 1
    awk '{ print $1 + $2 }' "$work/time"
  fi
}
declare -A least=()
measure() {  # measure NAME FILE OPTION...
  local name=$1 file=$2 n
  shift 2
  n=$(cost "$cxx" -std=c++20 "$@" -I include -c "$file" -o "$work/$name.o") ||
    { cat "$work/said"; echo "FAILED: $cxx does not compile $file"; exit 1; }
  least[$name]=$(awk -v a="$n" -v b="${least[$name]:-$n}" 'BEGIN { print a + 0 < b + 0 ? a : b }')
}
for _ in 1 2 3; do
  measure fixed tools/compile_time_unit.cpp -O2
  measure empty "$work/empty.cpp" -O0
  measure umbrella "$work/umbrella.cpp" -O0
  measure tree "$work/tree.cpp" -O0
  measure one "$work/quick_start.cpp" -O2 -DCHUNKATTN_ISA=portable
  measure all "$work/quick_start.cpp" -O2
  measure elsewhere "$work/quick_start.cpp" -O2 -DCHUNKATTN_EXTERN_KERNELS
done
awk -v fixed="${least[fixed]}" -v empty="${least[empty]}" -v umbrella="${least[umbrella]}" -v tree="${least[tree]}" \
  -v one="${least[one]}" -v all="${least[all]}" -v elsewhere="${least[elsewhere]}" -v cxx="$cxx" -v unit="$unit" 'BEGIN {
  umbrella = (umbrella - empty) / fixed; tree = (tree - empty) / fixed; one /= fixed; all /= fixed; elsewhere /= fixed
  printf "compile time with %s, in %s, as multiples of the fixed unit: umbrella header %.2f (limit 0.7), ", cxx, unit, umbrella
  printf "prefix_tree.hpp %.2f (limit 0.3), ", tree
  printf "quick start at -O2 %.2f with one instruction set (limit 3.2), %.2f with all (limit 6), ", one, all
  printf "%.2f with kernels compiled elsewhere (limit 2.2)\n", elsewhere
  if (umbrella > 0.7 || tree > 0.3 || one > 3.2 || all > 6 || elsewhere > 2.2) { print "FAILED: above the limit"; exit 1 }
}'
