#!/usr/bin/env bash
# Measures what README's quick start costs to compile at -O2, with kernels for all instruction sets, as a
# multiple of a fixed unit of the standard library (compile_time_unit.cpp, at -O2) that the same compiler
# compiles in the same run, so that it says the same on any processor. Counts instructions where perf can,
# else seconds of CPU time; the best of three rounds. Fails above the budget in budgets.txt.
#
# compile_time.sh table [INCLUDE]: what programs cost, as a table in Markdown, of the headers in INCLUDE:
# seconds of the processor at -O0 and -O2 (the least of three), memory, functions and code at -O2.
set -eu
cd "$(dirname "$0")/.."
cxx=${CXX:-c++}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

tools/quick_start.sh README.md >"$work/quick_start.cpp"

if [ "${1:-}" = table ]; then
  include=${2:-include}
  [ -x /usr/bin/time ] || { echo "FAILED: the table needs GNU time (Debian: apt-get install time)"; exit 1; }
  : >"$work/empty.cpp"
  echo '#include <chunkattn/chunkattn.hpp>' >"$work/umbrella.cpp"
  echo '#include <chunkattn/prefix_tree.hpp>' >"$work/tree.cpp"
  cat >"$work/tree_program.cpp" <<'END'
#include <chunkattn/prefix_tree.hpp>
#include <vector>
int main() {
  chunkattn::PrefixTree<int> tree(chunkattn::PoolAllocator{.max_chunks = 1024});
  std::vector<chunkattn::PrefixTree<int>::Sequence> chats;
  chats.push_back(tree.insert(std::vector<int>(1000, 7)));
  auto step = tree.begin_step();
  if (!step.add(chats)) return 1;
  auto finished = std::move(step).finish();
  for (const auto& row : finished.rows()) finished.commit(row, 100);
}
END
  sed 's/KvCache<Cpu, half>/KvCache<Cpu, bfloat16>/' "$work/quick_start.cpp" >"$work/bfloat16.cpp"
  sed 's/KvCache<Cpu, half>/KvCache<Cpu, std::int8_t>/' "$work/quick_start.cpp" >"$work/int8.cpp"
  cat >"$work/any.cpp" <<'END'
#include <chunkattn/runtime/make_attention.hpp>
using namespace chunkattn;
std::unique_ptr<AnyAttention> make() {
  return make_attention<Cpu, HeadDims<64, 128>, ElementTypes<half, bfloat16>>(64);
}
END
  echo "| $("$cxx" --version | head -n 1) | -O0, s | -O2, s | MB | functions | KB |"
  echo "| --- | --- | --- | --- | --- | --- |"
  row() {  # row NAME FILE OPTION...
    local name=$1 file=$2 level n cpu memory seconds=()
    shift 2
    for level in -O0 -O2; do
      cpu=""
      for n in 1 2 3; do
        /usr/bin/time -f "%U %M" -o "$work/time" "$cxx" -std=c++20 $level "$@" -I "$include" -c "$file" \
          -o "$work/object.o" >"$work/said" 2>&1 || { cat "$work/said"; echo "FAILED: $file"; exit 1; }
        cpu=$(tail -n 1 "$work/time" | awk -v least="$cpu" '{ print least == "" || $1 < least ? $1 : least }')
      done
      seconds+=("$cpu")
      memory=$(awk 'END { printf "%.0f", $2 / 1024 }' "$work/time")
    done
    printf '| %s | %s | %s | %s | %s | %s |\n' "$name" "${seconds[0]}" "${seconds[1]}" "$memory" \
      "$(nm "$work/object.o" | grep -c ' [tTW] ' || true)" "$(size "$work/object.o" | awk 'NR == 2 { printf "%.0f", $1 / 1024 }')"
  }
  row "an empty file" "$work/empty.cpp"
  row "\`prefix_tree.hpp\`, not used" "$work/tree.cpp"
  row "\`chunkattn.hpp\`, not used" "$work/umbrella.cpp"
  row "a program with a tree" "$work/tree_program.cpp"
  row "README's program" "$work/quick_start.cpp"
  row "… its kernels elsewhere" "$work/quick_start.cpp" -DCHUNKATTN_EXTERN_KERNELS
  row "… one instruction set" "$work/quick_start.cpp" -DCHUNKATTN_ISA=portable
  row "… bfloat16" "$work/bfloat16.cpp"
  row "… int8" "$work/int8.cpp"
  row "\`make_attention\`, two sizes × two types" "$work/any.cpp"
  exit
fi

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
  measure program "$work/quick_start.cpp" -O2
done
most=$(sed -n 's/^compile_time  *//p' tools/budgets.txt)
awk -v fixed="${least[fixed]}" -v program="${least[program]}" -v most="$most" -v cxx="$cxx" -v unit="$unit" 'BEGIN {
  printf "compile time with %s, in %s: quick start at -O2 %.2f of the fixed unit, budget %.2f\n", cxx, unit, program / fixed, most
  if (most <= 0 || program > most * fixed) { print "FAILED: above the budget"; exit 1 }
}'
