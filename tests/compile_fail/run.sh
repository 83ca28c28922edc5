#!/usr/bin/env bash
# run.sh CASE.cpp [WORK]: the case must be refused by the compiler with every text it names in a line
#   // expect: TEXT
# in at most as many lines as it says, if it does, in a line
#   // lines: NUMBER
# and must compile when CHUNKATTN_CONTROL is defined, so that it is refused for that reason only. All of
# that once for each NAME, as which CHUNKATTN_EACH is defined, where it has a line
#   // each: NAME...
# run.sh precompile WORK: into WORK what most cases include, which they are given if they are given WORK.
set -u
# The kernels that compile fastest.
compiler=("${CXX:-c++}" -std=c++20 -DCHUNKATTN_ISA=portable -Iinclude -Itests)
if [ "$1" = precompile ]; then
  mkdir -p "$2"
  echo '#include <chunkattn/chunkattn.hpp>' >"$2/common.hpp"
  exec "${compiler[@]}" -x c++-header "$2/common.hpp" -o "$2/common.hpp.gch"
fi
case_file=$1
compile=("${compiler[@]}" -fsyntax-only ${2:+-include "$2/common.hpp"} "$case_file")

check() {  # check [options...]
  local errors text lines most
  if ! errors=$("${compile[@]}" "$@" -DCHUNKATTN_CONTROL 2>&1); then
    printf 'FAILED: the control of %s does not compile:\n%s\n' "$case_file $*" "$errors"
    exit 1
  fi
  if errors=$("${compile[@]}" "$@" 2>&1); then
    echo "FAILED: $case_file $* compiles, but should be refused"
    exit 1
  fi
  for text in "${expected[@]}"; do
    if ! grep -qF -- "$text" <<<"$errors"; then
      printf 'FAILED: the errors of %s lack the text\n  %s\nThe compiler said:\n%s\n' \
        "$case_file $*" "$text" "$errors"
      exit 1
    fi
  done
  lines=$(wc -l <<<"$errors") most=$(sed -n 's|^// lines: ||p' "$case_file")
  if [ "$lines" -gt "${most:-$lines}" ]; then
    printf 'FAILED: the errors of %s take %s lines:\n%s\n' "$case_file $*" "$lines" "$errors"
    exit 1
  fi
  echo "refused as expected: ${expected[*]}${1:+ ($1)}"
}

mapfile -t expected < <(sed -n 's|^// expect: ||p' "$case_file")
if [ ${#expected[@]} -eq 0 ]; then
  echo "FAILED: $case_file names no expected text"
  exit 1
fi
each=$(sed -n 's|^// each: ||p' "$case_file")
for name in $each; do check "-DCHUNKATTN_EACH=$name"; done
[ -n "$each" ] || check
