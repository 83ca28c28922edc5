#!/usr/bin/env bash
# Measures everything docs/benchmarks.md shows of the CPU, and rewrites its tables and plots.
#
#   tools/measure_benchmarks.sh [decode|tree|page]...     default: all, about 30 minutes
#
# BUILD=DIR    where decode_bench and tree_bench are (default build/release/bench, from ./dev bench)
# PREFIX=CMD   put before every measurement, for example a lock or taskset; each takes about 30 s
# PYTHON=EXE   an interpreter with matplotlib
# CHUNKATTN_BENCH_THREADS=N   default 2
set -euo pipefail
cd "$(dirname "$0")/.."
BUILD=${BUILD:-build/release/bench}
PREFIX=${PREFIX:-}
PYTHON=${PYTHON:-python3}
export CHUNKATTN_BENCH_THREADS=${CHUNKATTN_BENCH_THREADS:-2}
out=docs/benchmarks
mkdir -p "$out"

# run_bench PROGRAM REPORT OPTION...: written beside and moved, so a failed run leaves the old report
run_bench() {
  local program=$1 report=$2
  shift 2
  echo "==> $report"
  $PREFIX "$BUILD/$program" --benchmark_out_format=json --benchmark_out="$out/$report.new" "$@"
  mv "$out/$report.new" "$out/$report"
}

measure_decode() {
  local type
  for type in fp32 fp16 bf16 int8; do
    run_bench decode_bench "decode_$type.json" \
      --benchmark_filter="^ours/$type/.*/(own:64|shared:(0|1024|1536)/own:[0-9]+)/cold/m"
  done
  run_bench decode_bench decode_batch.json \
    --benchmark_filter='/fp16/heads:32:32/b:[0-9]+/shared:2048/own:64/cold/m'
  run_bench decode_bench decode_completion.json \
    --benchmark_filter='/fp16/heads:32:32/b:32/shared:2048/own:(1|256|512|1024|2048)/cold/m'
  run_bench decode_bench decode_shapes.json \
    --benchmark_filter='^ours/fp16/.*/(warm/m|own:staggered/|cold/chunk:)'
  run_bench decode_bench interleaved.json --benchmark_filter='^interleaved/'
  local heads
  for heads in 32:32 32:8 16:1; do
    run_bench decode_bench "decode_trees_${heads/:/_}.json" \
      --benchmark_filter="/heads:$heads/tree:[0-9]+/cold/m"
  done
}

measure_tree() {
  run_bench tree_bench tree.json --benchmark_min_time=0.1
}

make_page() { "$PYTHON" tools/plot_benchmarks.py; }

[ $# -gt 0 ] || set -- decode tree page
for part in "$@"; do
  case $part in
    decode | tree) "measure_$part" ;;
    page) make_page ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
done
