#!/usr/bin/env bash
# check_windows_alignment.sh WORK_DIR: what g++ for Windows compiles has no access to 32 or 64 bytes of memory that
# demands their alignment, which it does not give the stack (GCC's bug 54412): by default it uses no such vector, and
# with CHUNKATTN_UNALIGNED_MOVES the assembler replaces these accesses. Anything else is refused.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cxx=x86_64-w64-mingw32-g++-posix
work=$1

fail() { echo "FAILED: $*"; exit 1; }

mkdir -p "$work"
cat >"$work/attend.cpp" <<'END'
#include <chunkattn/chunk_attention.hpp>
using namespace chunkattn;
void attend(ChunkAttention<Cpu, 80>& attention, const LiveView& plan, const KvView<float>& kv,
            const KvView<half>& halves, const KvView<std::int8_t>& bytes, std::span<const float> q,
            std::span<float> out) {
  attention.run(kv, plan, q, out);
  attention.run(halves, plan, q, out);
  attention.run(bytes, plan, q, out);
}
END
compiled() {  # compiled OPTIONS...: what of it uses such vectors, and what of that demands their alignment
  "$cxx" -std=c++20 -I "$root/include" -Wa,-mbig-obj "$@" -c "$work/attend.cpp" -o "$work/attend.o" 2>"$work/said" ||
    return 1
  x86_64-w64-mingw32-objdump -d --no-show-raw-insn "$work/attend.o" >"$work/all"
  grep -E '%[yz]mm' "$work/all" >"$work/vectors" || true
  grep -E '\bv(movap|movdqa|movnt)' "$work/vectors" | grep -F '(' >"$work/aligned" || true
}
for level in -O1 -O3; do
  compiled $level || { cat "$work/said"; fail "$level"; }
  [ ! -s "$work/vectors" ] || { head "$work/vectors"; fail "the default at $level uses vectors of AVX"; }
  options="-DCHUNKATTN_UNALIGNED_MOVES -Wa,-muse-unaligned-vector-move"
  # shellcheck disable=SC2086
  compiled $level $options || { cat "$work/said"; fail "$level $options"; }
  [ -s "$work/vectors" ] || fail "$options: no vector of AVX is used, so this shows nothing"
  [ ! -s "$work/aligned" ] || { cat "$work/aligned"; fail "$options: the accesses above demand alignment"; }
  echo "$level: no vector of AVX by default; $(wc -l <"$work/vectors") instructions with unaligned moves, none aligned"
done
compiled -O3 -DCHUNKATTN_UNALIGNED_MOVES
[ -s "$work/aligned" ] || fail "without the assembler's option nothing is aligned either: this check sees nothing"
echo "-O3 without the assembler's option: $(wc -l <"$work/aligned") aligned accesses:"
sed 's/ *#.*//' "$work/aligned"
for options in -mavx2 -march=haswell -DCHUNKATTN_ISA=avx2 -DCHUNKATTN_ISA=avx512; do
  if compiled -O1 $options; then fail "$options compiles"; fi
  grep -q 'GCC bug 54412' "$work/said" || { cat "$work/said"; fail "$options: refused for another reason"; }
  echo "refused: $options"
done
