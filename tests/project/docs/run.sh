#!/usr/bin/env bash
# run.sh DOC WORK: compiles and runs every C++ block of a document.
#
#   ```cpp preamble   stands first in the program that the blocks marked ```cpp make: a function each
#   ```cpp            in the order of the page
#   ```cpp program    is a program by itself; an ```output block after it is all that it prints
#
# A header NAME.hpp beside this script is included before all blocks of NAME.md: what the page takes for
# granted.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$here
until [ -e "$root/dev" ] && [ -d "$root/include/chunkattn" ]; do root=$(dirname "$root"); done
cd "$root"
doc=$1 work=$2
[ ! -d "$work" ] || rm -f "$work"/*.cpp "$work"/*.expected
mkdir -p "$work"
fail() { echo "FAILED: $doc: $*"; exit 1; }

awk -v work="$work" '
  /^```cpp preamble$/ { inside = 1; next }
  /^```cpp program$/ { inside = 2; file = work "/program_" ++programs ".cpp"; next }
  /^```output$/ { inside = 2; file = work "/program_" programs ".expected"; next }
  /^```cpp$/ { inside = 1; ++snippets; body = 1; print "void snippet_" snippets "() {" >(work "/snippets.cpp"); next }
  /^```cpp/ { print "a block that is neither plain, preamble nor program: " $0; failed = 1 }
  /^```$/ && inside { if (body) print "}" >(work "/snippets.cpp"); inside = body = 0; next }
  inside == 1 { print >(work "/snippets.cpp") }
  inside == 2 { print >file }
  END {
    if (snippets > 0) {
      print "int main() {" >(work "/snippets.cpp")
      for (i = 1; i <= snippets; ++i) print "  snippet_" i "();" >(work "/snippets.cpp")
      print "  std::printf(\"" snippets " snippets ran\\n\");\n}" >(work "/snippets.cpp")
    }
    exit failed
  }
' "$doc" || fail "see above"

# The kernels that compile fastest.
given=(-DCHUNKATTN_ISA=portable) fixture=$here/$(basename "$doc" .md).hpp
[ ! -e "$fixture" ] || given+=(-I tests -include "$fixture")
ran=0
for source in "$work"/*.cpp; do
  [ -e "$source" ] || fail "no C++ blocks"
  program=${source%.cpp}
  "${CXX:-g++}" -std=c++20 -Og -Wall -Wextra -UNDEBUG -I include "${given[@]}" "$source" -o "$program" -pthread
  if [ -e "$program.expected" ]; then
    "$program" >"$program.printed" || fail "$(basename "$program") leaves with $?"
    diff "$program.expected" "$program.printed" || fail "the program does not print what the page shows (<)"
  else
    "$program"
  fi
  ran=$((ran + 1))
done
echo "$doc: $ran programs compiled and run"
