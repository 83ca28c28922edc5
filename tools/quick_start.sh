#!/usr/bin/env bash
# quick_start.sh README [MARKER]: prints the C++ block that follows <!-- MARKER -->, by default quick-start.
set -eu
awk -v marker="<!-- ${2:-quick-start} -->" '
  index($0, marker) { marked = 1 }
  marked && /^```cpp/ { inside = 1; next }
  inside && /^```/ { found = 1; exit }
  inside { print }
  END { if (!found) { print "no " marker " in the README" > "/dev/stderr"; exit 1 } }
' "$1"
