#!/usr/bin/env bash
# versions.sh FOLDER: CMake takes the oldest ggml that is supported, and refuses what is older, or of no version,
# by its reason. (The sources are stand-ins: nothing is compiled.)
set -euo pipefail
folder=$(realpath -m "$1")
plugin=$(cd "$(dirname "$0")/.." && pwd)
oldest=$(sed -nE 's/^set\(oldest ([0-9.]+)\).*/\1/p' "$plugin/CMakeLists.txt")

configure() {  # configure VERSION: its output is in `said`
  local source=$folder/source
  rm -rf "$folder"
  mkdir -p "$source/ggml/src"
  touch "$source/ggml/src/ggml-backend-impl.h"
  local major minor patch
  IFS=. read -r major minor patch <<<"$1"
  {
    echo "project(ggml)"
    [ -z "$major" ] || printf 'set(GGML_VERSION_%s %s)\n' MAJOR "$major" MINOR "$minor" PATCH "$patch"
  } >"$source/ggml/CMakeLists.txt"
  said=$("${CMAKE:-cmake}" -S "$plugin" -B "$folder/build" -DLLAMA_CPP_DIR="$source" \
    -DCHUNKATTN_GGML_HEAD_DIMS=64 2>&1) || return 1
}
fail() { printf '%s\nFAILED: %s\n' "$said" "$*"; exit 1; }

for version in "$oldest" "${oldest%%.*}.100.0"; do
  configure "$version" || fail "ggml $version was refused"
  grep -q "ggml $version" <<<"$said" || fail "ggml $version: not said"
  echo "$version: taken"
done
for version in 0.9.11 "${oldest%.*}.$((${oldest##*.} - 1))" ""; do
  if configure "$version"; then fail "ggml '$version' was taken"; fi
  said=$(tr -s ' \n' ' ' <<<"$said")
  grep -q "its ggml is of version '$version': expected $oldest or newer" <<<"$said" || fail "'$version': not by its reason"
  echo "'$version': refused"
done
