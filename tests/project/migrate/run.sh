#!/usr/bin/env bash
# run.sh CHECK WORK_DIR: tools/migrate_0.3.sh makes sources written for 0.2 compile with these headers.
#
#   names      uses_0.2.cpp, and what the script says of names that no rule can do
#   examples   the example programs of the tag v0.2.1
#
# Exit 0: passed. 77: something is missing, said aloud. Anything else: failed.
set -euo pipefail
check=$1 work=$2
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
cxx=${CXX:-c++}
rm -rf "$work"
mkdir -p "$work"
cd "$work"

fail() { echo "FAILED: $*"; exit 1; }
skip() { echo "SKIPPED: $*"; exit 77; }
compiles() { "$cxx" -std=c++20 -fsyntax-only -Wall -Werror -I "$root/include" -I . "$@"; }

case $check in
  names)
    cp "$here/uses_0.2.cpp" unit.cpp
    ! compiles unit.cpp 2>/dev/null || fail "it compiles before the script has been over it"
    bash "$root/tools/migrate_0.3.sh" --diff unit.cpp >difference
    cmp unit.cpp "$here/uses_0.2.cpp" || fail "--diff changes the file"
    grep -q '^+.*chunks_needed' difference || fail "--diff does not show a change"
    bash "$root/tools/migrate_0.3.sh" . | tee said
    grep -qx '1 files changed' said || fail "not one file changed"
    compiles unit.cpp || fail "it does not compile"
    bash "$root/tools/migrate_0.3.sh" unit.cpp >said
    grep -qx '0 files changed' said || fail "a second run changes it again"

    printf '%s\n' '#include <chunkattn/chunkattn.hpp>' '#include <chunkattn/base/spin_lock.hpp>' \
      'chunkattn::SpinLock lock;' 'using Pair = chunkattn::Both<chunkattn::SoftCap, chunkattn::Alibi>;' \
      'chunkattn::FailureHandler old = nullptr;' >by_hand.cpp
    status=0
    bash "$root/tools/migrate_0.3.sh" by_hand.cpp >said 2>&1 || status=$?
    [ $status = 1 ] || fail "the exit status is $status where something is left to do"
    for line in 2 3 4 5; do
      grep -q "^by_hand.cpp:$line: " said || fail "nothing is said of line $line:" "$(cat said)"
    done
    printf 'int slot_of(int slot);\nint num_slots = 3;\n' >other.cpp
    bash "$root/tools/migrate_0.3.sh" other.cpp | grep -qx '0 files changed' ||
      fail "a file that does not mention the library was changed"
    echo "names of 0.2 are those of 0.3"
    ;;
  examples)
    git -C "$root" rev-parse -q --verify 'v0.2.1^{commit}' >/dev/null 2>&1 ||
      skip "migrate examples needs a clone with the tag v0.2.1"
    for header in fmt/format.h nlohmann/json.hpp xxhash.h; do
      echo "#include <$header>" | "$cxx" -std=c++20 -E -x c++ - >/dev/null 2>&1 ||
        skip "migrate examples needs $header (Debian: apt-get install libfmt-dev nlohmann-json3-dev libxxhash-dev)"
    done
    git -C "$root" archive v0.2.1 examples | tar x
    bash "$root/tools/migrate_0.3.sh" examples || fail "something is left to do by hand"
    for unit in custom_allocator engine_integration/main persist/main shared_prompt/run_fp32 \
      serve/engine/attention_fp32 serve/parallel/context_part; do
      compiles -I examples/serve "examples/$unit.cpp" || fail "examples/$unit.cpp of 0.2.1 does not compile"
      echo "examples/$unit.cpp"
    done
    ;;
  *) fail "no check is named '$check'" ;;
esac
