#!/usr/bin/env bash
# faults.sh PROGRAM PLUGIN FOLDER: a program of llama.cpp that is given a plugin which is missing, no library,
# no backend, of another version of ggml or of its interface, or for another processor: it continues without the
# plugin and says why.
set -euo pipefail
program=$1
plugin=$2
folder=$3
mkdir -p "$folder"

says() {  # says WHAT PLUGIN TEXT [UNDER...]: the program lists its devices, without the plugin, and prints TEXT
  local output
  output=$(GGML_BACKEND_PATH=$2 "${@:4}" "$program" support -o NONE -b none 2>&1) || { echo "$output"; echo "FAILED: $1: it ended"; exit 1; }
  if grep -q 'loaded chunkattn backend' <<<"$output" || ! grep -qE "$3" <<<"$output"; then
    echo "$output"
    echo "FAILED: $1: expected it to say '$3'"
    exit 1
  fi
  echo "$1: $(grep -E "$3" <<<"$output" | head -1)"
}

says "missing" "$folder/missing.so" 'failed to load .*No such file'
echo "no library" >"$folder/text.so"
says "no library" "$folder/text.so" 'failed to load .*(invalid ELF header|file too short)'
echo 'int nothing;' | "${CC:-cc}" -shared -fPIC -x c - -o "$folder/other.so"
says "no backend" "$folder/other.so" 'failed to find ggml_backend_init'
# The version that it was built for, replaced in a copy by another of the same length.
version=$(strings -a "$plugin" | sed -nE 's/^built for ggml ([0-9.]+)$/\1/p' | head -1)
[ -n "$version" ] || { echo "FAILED: the plugin does not say which ggml it was built for"; exit 1; }
LC_ALL=C sed "s/$version/$(tr 0-9 9 <<<"$version")/g" "$plugin" >"$folder/version.so"
says "another version" "$folder/version.so" 'chunkattn: built for ggml .*not used'
# The plugin's own registry, which says that it is of another version of ggml's interface.
"${CC:-cc}" -shared -fPIC -x c - -o "$folder/interface.so" -ldl <<EOF
#include <dlfcn.h>
int* ggml_backend_init(void) {
  int* (*init)(void) = (int* (*)(void))dlsym(dlopen("$(realpath "$plugin")", RTLD_NOW), "ggml_backend_init");
  int* registry = init();
  *registry += 7;
  return registry;
}
EOF
says "another interface" "$folder/interface.so" 'incompatible API version \(backend: [0-9]+, current'
# Valgrind's processor has no AVX-512.
if ! command -v valgrind >/dev/null; then
  echo "another processor: SKIPPED: no valgrind, which stands for one"
elif ! grep -qw avx512f /proc/cpuinfo; then
  echo "another processor: SKIPPED: valgrind stands for one without AVX-512, as this one is"
else
  says "another processor" "$plugin" 'is not supported on this system' valgrind -q --tool=none
fi
