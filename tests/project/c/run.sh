#!/usr/bin/env bash
# run.sh WORK: the C interface as its users have it: a shared library, made of one source file, of several, and
# installed, called by programs of a C compiler, by Python's ctypes and by Rust (examples/c). A hostile program
# calls it under sanitizers.
# Exit 0: passed. 77: a tool is missing, said aloud. Anything else: failed.
set -euo pipefail
work=$1
root=$(cd "$(dirname "$0")/../../.." && pwd)
here=$root/examples/c
cxx=${CXX:-c++} cc=${CC:-cc}
rm -rf "$work"
mkdir -p "$work"
cd "$work"
fail() { echo "FAILED: $*"; exit 1; }
strict="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror"
# shellcheck disable=SC2086
compile() { "$cxx" -std=c++20 -Og -fPIC -fvisibility=hidden $strict -DCHUNKATTN_ISA=native -I "$root/include" "$@"; }

compile -shared "$here/kernels.cpp" -o libone.so -pthread

# The same in several: kernels, trees, and functions that compile neither.
echo '#include <chunkattn/c/kernels.ipp>
CHUNKATTN_C_KERNEL(64, 64, float, float)' >kernel.cpp
echo '#include <chunkattn/c/tree_of_size.ipp>
CHUNKATTN_C_TREE(16) CHUNKATTN_C_TREE(32) CHUNKATTN_C_TREE(64) CHUNKATTN_C_TREE(128)' >trees.cpp
{ echo '#define CHUNKATTN_C_EXTERN_KERNELS
#define CHUNKATTN_C_EXTERN_TREES'; cat "$here/kernels.cpp"; } >functions.cpp
compile -c kernel.cpp -o kernel.o
compile -c trees.cpp -o trees.o
compile -c functions.cpp -o functions.o
if nm -C functions.o | grep -q 'SequenceFirst\|sequence_first\|TokenTree'; then
  fail "functions.cpp compiles kernels or trees"
fi
"$cxx" -shared functions.o kernel.o trees.o -o libtwo.so -pthread

# C99, and C++ that includes the header twice.
"$cc" -std=c99 -Wall -Wextra -Wpedantic -Werror -I "$root/include" -c "$here/attend.c" -o attend.o
echo '#include <chunkattn/c/chunkattn.h>
#include <chunkattn/c/chunkattn.h>
int version() { return chunkattn_c_version(); }' >twice.cpp
"$cxx" -std=c++11 $strict -I "$root/include" -c twice.cpp -o twice.o
for library in one two; do
  nm -D --defined-only lib$library.so | awk '$2 == "T" { print $3 }' | sort >exported
  cat "$root"/include/chunkattn/c/{tree,chunkattn}.h | tr '\n' ' ' | grep -oE 'CHUNKATTN_C_API [^;]*;' |
    sed -nE 's/^[^(]*\b(chunkattn_[a-z_]+)\(.*$/\1/p' | sort -u >declared
  diff declared exported || fail "lib$library.so exports something else than chunkattn.h declares"
  "$cc" attend.o -L. -l$library -Wl,-rpath,"$PWD" -lm -o attend
  ./attend >attend.log || { cat attend.log; fail "attend.c with lib$library.so"; }
  grep -q '^5 pages are read, not 8$' attend.log || { cat attend.log; fail "attend.c shares nothing"; }
  if command -v python3 >/dev/null; then
    python3 "$here/attend.py" "$PWD/lib$library.so" || fail "attend.py with lib$library.so"
  else
    echo "without: attend.py needs python3"
  fi
done

# Installed: soname, versions of symbols, pkg-config; the programs of examples/c against it, where it was moved to.
cmake=${CMAKE:-cmake}
"$cmake" -S "$root" -B build -DCMAKE_CXX_COMPILER="$cxx" -DCHUNKATTN_INSTALL_C=ON -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CXX_FLAGS="-O1 -DCHUNKATTN_ISA=native" -DCMAKE_INSTALL_LIBDIR=lib \
  -DCHUNKATTN_C_KERNELS="64/float/float;8/float/float" >cmake.log || { cat cmake.log; fail "cmake"; }
"$cmake" --build build --target chunkattn_c >cmake.log || { cat cmake.log; fail "cmake --build"; }
"$cmake" --install build --prefix "$PWD/first" >cmake.log
mv first stage
version=$(sed -n 's/^#define CHUNKATTN_C_VERSION //p' "$root/include/chunkattn/c/tree.h")
library=$PWD/stage/lib/libchunkattn.so
objdump -p "$library" | grep "SONAME *libchunkattn.so.$version\$" >soname.log ||
  fail "the soname is not libchunkattn.so.$version"
nm -D --defined-only "$library" | awk '$2 == "T" { print $3 }' | sort >exported
sed "s/\$/@@CHUNKATTN_$version/" declared | diff - exported || fail "the installed library's symbols"
if command -v pkg-config >/dev/null; then
  flags=$(PKG_CONFIG_PATH=$PWD/stage/lib/pkgconfig pkg-config --cflags --libs chunkattn-c)
else
  flags="-I$PWD/stage/include -L$PWD/stage/lib -lchunkattn"
  echo "without: chunkattn-c.pc needs pkg-config"
fi
for program in attend engine router; do  # shellcheck disable=SC2086
  "$cc" -std=c11 -Wall -Wextra -Werror "$here/$program.c" $flags -Wl,-rpath,"$PWD/stage/lib" -lm -o $program
done
./attend >attend.log || { cat attend.log; fail "attend.c with the installed library"; }
./router >router.log || { cat router.log; fail "router.c"; }
grep -c 'so to server' router.log | grep -x 12 >count.log || { cat router.log; fail "router.c says little"; }
if command -v python3 >/dev/null; then
  python3 "$here/tree.py" "$library" || fail "tree.py"
fi
if command -v rustc >/dev/null; then
  rustc --edition 2021 "$here/router.rs" -L stage/lib -l chunkattn -C link-arg=-Wl,-rpath,"$PWD/stage/lib" \
    -o router_rs || fail "router.rs does not compile"
  ./router_rs >router_rs.log || { cat router_rs.log; fail "router.rs"; }
  head -n 12 router.log | diff - router_rs.log || fail "router.rs and router.c send requests elsewhere"
else
  echo "without: router.rs needs rustc"
fi
# The loop in C gives the texts that llama2.c gives, token for token.
models=${CHUNKATTN_DATA:-$root/../shared}/models
if [ -e "$models/stories260K.bin" ] && command -v python3 >/dev/null; then
  python3 - "$models" <<'PY' || fail "engine.c gives other texts"
import json, subprocess, sys
models = sys.argv[1]
known = json.load(open(f"{models}/stories260K.prompts.json"))
got = subprocess.run(["./engine", f"{models}/stories260K.bin", f"{models}/tok512.bin", "257",
                      *(text["prompt"] for text in known)], capture_output=True, text=True, check=True)
print("engine.c:", got.stderr.strip())
assert got.stdout == "".join(text["text"] + "\n" for text in known)
assert "40 were shared" in got.stderr
PY
else
  echo "without: engine.c needs $models/stories260K.bin and python3"
fi

# Hostile calls, under ASan and UBSan.
sanitize="-fsanitize=address,undefined -fno-sanitize-recover=all"
echo '#include <cstdint>
#define CHUNKATTN_C_KERNELS(X) X(8, 8, std::int8_t, float)
#include <chunkattn/c/chunkattn.ipp>' >hostile.cpp
# shellcheck disable=SC2086
compile -g1 $sanitize -shared hostile.cpp -o libhostile.so -pthread
# shellcheck disable=SC2086
"$cc" -std=c11 -Wall -Wextra -Werror -g1 $sanitize -I "$root/include" "$root/tests/project/c/hostile.c" -L. -lhostile \
  -Wl,-rpath,"$PWD" -lm -o hostile
./hostile "${CHUNKATTN_SEED:-$RANDOM}" 100000 || fail "hostile.c"
cat attend.log router.log
