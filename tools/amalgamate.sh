#!/usr/bin/env bash
# Prints the whole CPU library as one header. The output depends on the headers alone.
set -eu
cd "$(dirname "$0")/.."
license=$(sed 's|^|// |; s| *$||' LICENSE)
awk -v license="$license" '
  function exists(path,    line, ok) {
    ok = (getline line < path) >= 0
    close(path)
    return ok
  }
  # Removes "folder/.." from a path.
  function normal(path) {
    while (match(path, /[^\/]+\/\.\.\//)) path = substr(path, 1, RSTART - 1) substr(path, RSTART + RLENGTH)
    return path
  }
  # What is in the way of including a header twice: itself, a guard that others may undefine, or nothing.
  function guard(path,    line) {
    while ((getline line < path) > 0 && line !~ /^#/) continue
    close(path)
    if (line ~ /^#pragma once/) return path
    if (sub(/^#ifndef /, "", line)) return line
    return ""
  }
  function emit(path,    key, line, name, folder, target) {
    key = guard(path)
    if (key in seen) return
    if (key != "") seen[key] = 1
    folder = path
    sub(/[^\/]*$/, "", folder)
    print "\n// --- " substr(path, 9) " ---\n"
    while ((getline line < path) > 0) {
      if (line ~ /^#pragma once/) continue
      if (line ~ /^ *#include "/) {
        name = line
        sub(/^[^"]*"/, "", name)
        sub(/".*$/, "", name)
        if (name ~ /\.cuh$/) continue  # the CUDA backend is not part of the single header
        target = normal(folder name)
        if (!exists(target)) target = "include/" name
        if (!exists(target)) {
          print path ": cannot find " name > "/dev/stderr"
          exit 1
        }
        emit(target)
        continue
      }
      print line
      if (sub(/^#undef /, "", line)) delete seen[line]
    }
    close(path)
  }
  BEGIN {
    print "// chunkattn as a single header, generated from the headers in include/: the CPU library."
    print "//"
    print license
    print "#ifndef CHUNKATTN_SINGLE_HEADER"
    print "#define CHUNKATTN_SINGLE_HEADER"
    emit("include/chunkattn/all.hpp")
    print "\n#endif  // CHUNKATTN_SINGLE_HEADER"
  }' | cat -s
