#!/usr/bin/env bash
# run.sh DOC WORK: compiles and runs the C++ blocks of a document. The block marked "cpp preamble"
# stands first in the program; each other ```cpp block becomes a function.
set -eu
cd "$(dirname "$0")/../../.."
doc=$1 work=$2
mkdir -p "$work"
awk '
  /^```cpp preamble$/ { inside = 1; next }
  /^```cpp$/ { inside = 2; printf "void snippet_%d() {\n", ++n; next }
  /^```$/ && inside { if (inside == 2) print "}"; inside = 0; next }
  inside { print }
  END {
    print "int main() {"
    for (i = 1; i <= n; ++i) printf "  snippet_%d();\n", i
    printf "  std::printf(\"%d snippets ran\\n\");\n}\n", n
  }
' "$doc" >"$work/snippets.cpp"
[ "$(grep -c '^void snippet_' "$work/snippets.cpp")" -ge 1 ] || { echo "no snippets in $doc"; exit 1; }
"${CXX:-g++}" -std=c++20 -O1 -Wall -Wextra -UNDEBUG -I include "$work/snippets.cpp" -o "$work/snippets" -pthread
"$work/snippets"
