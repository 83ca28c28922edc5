#!/usr/bin/env bash
# quick_start.sh README: prints the C++ block that follows the marker <!-- quick-start -->.
set -eu
awk '
  /<!-- quick-start -->/ { marked = 1 }
  marked && /^```cpp/ { inside = 1; next }
  inside && /^```/ { found = 1; exit }
  inside { print }
  END { if (!found) { print "no quick start in the README" > "/dev/stderr"; exit 1 } }
' "$1"
