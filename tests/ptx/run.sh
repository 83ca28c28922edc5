#!/usr/bin/env bash
# What nvcc makes of the kernels, run on the host in the place of the emulator.
#   run.sh compile WORK PROGRAM...   PTX of the kernels that the test programs launch, into WORK
#   run.sh test WORK PROGRAM [ARG...]  a program with them
#   run.sh forms WORK PROGRAMS       what so many programs have executed together, and which forms of instructions
#                                    none has, with the reasons of never.txt
#   run.sh counts WORK PROGRAM [ARG...]  gpu_counts.cpp with its kernel, and the registers of that
#   run.sh mutants WORK PROGRAM      faults in the assembly of ptx.cuh: each must make the program fail
# Environment: NVCC, CUDA_ARCH (80), JOBS (2). Exit: 0 passed, 77 a tool is missing, else failed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
mode=$1 work=$2
shift 2
skip() { echo "SKIPPED: $*"; exit 77; }
modules() { find "$work" -name 'kernels_*.ptx' | sort | paste -sd:; }

# Explicit instantiations of the kernels whose symbols the programs have. The types of what is in a
# namespace without a name are nobody else's to write: those kernels stay with the emulator.
kernels() {
  for program in "$@"; do nm -C "$program"; done |
    sed -n 's/^[0-9a-f]* [WT] \(void chunkattn::.*::cuda::[a-z_]*_kernel<.*>(.*Arguments<.*>)\|void .*::write_kernel<.*\|void .*begin_step_kernel<.*\)$/template __global__ \1;/p' |
    grep -v '(anonymous\|load_kernel\|lambda' | sort -u
}

compile() {
  nvcc=${NVCC:-}
  local arch=${CUDA_ARCH:-80} list
  [ -x "$nvcc" ] || nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  [ -x "$nvcc" ] || skip "ptx needs nvcc"
  mkdir -p "$work"
  list=$(kernels "$@")
  local stamp
  stamp=$( (echo "$arch $list"; find "$root/include" "$root/tests/support" -type f -print0 | sort -z | xargs -0 cat) | sha256sum)
  if [ "$(cat "$work/stamp" 2>/dev/null)" = "$stamp" ]; then echo "$(wc -l <<<"$list") kernels, as they were"; return; fi
  rm -f "$work"/kernels_* "$work/stamp"
  local parts
  parts=$(wc -l <<<"$list")
  split -n "r/$((parts < 8 ? parts : 8))" - "$work/kernels_" <<<"$list"
  for part in "$work"/kernels_??; do
    { printf '#include "%s"\n' chunkattn/detail/cuda/{merge_states,run_tasks,write,write_quantized}.cuh support/{tempered_case,variant_cases}.hpp
      cat "$part"; } >"$part.cu"
  done
  printf '%s\n' "$work"/kernels_??.cu | xargs -P "${JOBS:-2}" -I{} "$nvcc" -std=c++20 -O3 --expt-relaxed-constexpr \
    -I"$root" -I"$root/include" -I"$root/tests" -arch="sm_$arch" -ptx {} -o {}.ptx
  echo "$stamp" >"$work/stamp"
  echo "$(wc -l <<<"$list") kernels for sm_$arch"
}

forms() {
  local programs
  programs=$(find "$work/forms" -type f | wc -l)
  [ "$programs" -ge "$1" ] || skip "ptx forms: $programs of $1 programs have run by PTX"
  cat "$work"/forms/* | sort -u >"$work/forms.txt"
  sed -n 's/^executed //p' "$work/forms.txt" | sort >"$work/executed"
  sed -n 's/^held //p' "$work/forms.txt" | sort | comm -13 "$work/executed" - >"$work/never"
  local status=0 form reason
  while read -r form; do
    reason=$(sed -n "s/^${form//./[.]}  *//p" "$here/never.txt")
    echo "  never: $form: ${reason:-no reason is known (tests/ptx/never.txt)}"
  done <"$work/never"
  while read -r form reason; do
    if grep -qxF "$form" "$work/executed"; then echo "  FAILED: $form is in never.txt and was executed"; status=1; fi
  done < <(grep -v '^#' "$here/never.txt")
  awk -v forms="$(wc -l <"$work/executed")" -v never="$(wc -l <"$work/never")" \
    '/^counted/ { ++programs; launches += $2; instructions += $3; mma += $4 }
     END { printf "summary: CUDA tests by PTX: %d programs, %d launches, %.0f million instructions of warps, %d mma, ", programs, launches, instructions / 1e6, mma
           printf "%d forms of instructions, %d never executed (ctest -R ptx.forms -V)\n", forms, never }' "$work"/forms/*
  return $status
}

# What ptxas makes of the modules for the architectures whose PTX is the same.
registers() {
  local ptxas
  ptxas=$(dirname "$nvcc")/ptxas
  for arch in 80 90a; do
    for module in "$work"/kernels_*.ptx; do
      sed "s/^\.target sm_80/.target sm_$arch/" "$module" >"$work/module"
      "$ptxas" -v -arch="sm_$arch" -o "$work/module.cubin" "$work/module" 2>&1 |
        sed -n "s/^ptxas info *: Used/sm_$arch:/p; s/^ *\([0-9].*spill.*\)/sm_$arch: \1/p"
    done
  done
}

counts() {
  local program=$1
  shift
  compile "$program"
  registers
  export CHUNKATTN_PTX CHUNKATTN_SEED=${CHUNKATTN_SEED:-1}
  CHUNKATTN_PTX=$(modules)
  "$program" --check
  "$program" "$@"
}

case $mode in
  compile) compile "$@" ;;
  counts) counts "$@" ;;
  test)
    [ -n "$(modules)" ] || skip "ptx has no kernels (see the test ptx.kernels)"
    mkdir -p "$work/forms"
    program=$1
    shift
    forms=$work/forms/$(echo "$(basename "$program") $*" | tr -c 'a-z_\n' _)
    rm -f "$forms"
    CHUNKATTN_PTX=$(modules) CHUNKATTN_PTX_FORMS=$forms "$program" "$@"
    [ -s "$forms" ] || { echo "FAILED: $program has run no kernel by PTX: it is not linked with the interpreter"; exit 1; }
    ;;
  forms) [ -d "$work/forms" ] || skip "no program has run by PTX"; forms "$@" ;;
  mutants)
    [ -n "$(modules)" ] || skip "ptx has no kernels (see the test ptx.kernels)"
    CHUNKATTN_PTX=$(modules) exec python3 "$here/mutate.py" "$work" "$@" ;;
  *) echo "run.sh: no mode '$mode'"; exit 2 ;;
esac
