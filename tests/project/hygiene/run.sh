#!/usr/bin/env bash
# run.sh CHECK WORK_DIR: one check of how the headers behave in other people's builds.
# Exit 0: passed. 77: a tool is missing, said aloud. Anything else: failed.
set -euo pipefail
check=$1
work=$2
root=$(cd "$(dirname "$0")/../../.." && pwd)
here=$root/tests/project/hygiene
cxx=${CXX:-c++}
jobs=$(nproc 2>/dev/null || echo 2)
warnings="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror"
# A user's: g++ has -Wuseless-cast, and clang does not mind.
strict="$warnings -Wold-style-cast -Wsign-conversion -Wdouble-promotion -Wuseless-cast -Wno-unknown-warning-option"
rm -rf "$work"
mkdir -p "$work"
cd "$root"

fail() { echo "FAILED: $*"; exit 1; }
skip() { echo "SKIPPED: $*"; exit 77; }
find_clang() {
  for clang in "${CHUNKATTN_CLANG:-}" clang++-19 clang++-18 clang++-17 clang++-16 clang++-14 clang++; do
    if [ -n "$clang" ] && command -v "$clang" >/dev/null &&
      [ "$("$clang" -dumpversion | cut -d. -f1)" -ge 14 ]; then
      return 0
    fi
  done
  skip "hygiene $check needs clang 14 or newer (Debian: apt-get install clang-19 libc++-19-dev libc++abi-19-dev)"
}

# Each header on its own, included twice, as its own translation unit.
headers_with() {  # headers_with "compiler and options" [find's options]
  local command=$1
  shift
  find include "$@" -name '*.hpp' -print | sort | while read -r header; do
    unit=$work/$(echo "${header#include/}" | tr '/.' '__').cpp
    printf '#include <%s>\n#include <%s>\n' "${header#include/}" "${header#include/}" >"$unit"
    echo "$unit"
  done >"$work/units"
  [ -s "$work/units" ] || fail "no headers found"
  # shellcheck disable=SC2086
  xargs -P "$jobs" -I{} sh -c "$command -std=c++20 -fsyntax-only $strict -I include {} || { echo 'FAILED: {}'; exit 255; }" \
    <"$work/units"
  echo "$(wc -l <"$work/units") headers stand alone with $command"
}

# Compiles and runs a program: smoke "compiler" options...
smoke() {
  local compiler=$1
  shift
  # shellcheck disable=SC2086
  "$compiler" -std=c++20 $strict -I include "$here/smoke.cpp" -o "$work/smoke" -pthread "$@" ||
    fail "$compiler $*"
  "$work/smoke" || fail "wrong result with $compiler $*"
  echo "passed: $compiler $*"
}

# The system's headers that ours include, where the machine has them.
system_headers() {
  grep -hoE '^#include <[a-z0-9_]+(\.h)?>' -r include --include='*.hpp' | sort -u |
    sed -E 's~^#include <([a-z0-9_]+[.]h)>~#if __has_include(<\1>)\n&\n#endif~'
}

# foreign UNIT [options...]: what it includes beside our headers, the standard library and the system's.
foreign() {
  "$cxx" -std=c++20 -E -I include "$@" >"$work/preprocessed" || return 1
  sed -nE 's/^# [0-9]+ "([^<"]+)".*/\1/p' "$work/preprocessed" | sort -u | awk -v unit="$1" '
    $0 == unit || /^include\/chunkattn\// { next }
    /(^|\/)(fmt|nlohmann|CLI|xxhash|doctest|benchmark|cub|thrust|cuda|cccl)[\/._]/ { print; next }
    /\/c\+\+\/|\/lib\/(gcc|clang)\// { next }
    /^\/usr\/lib\/linux\/uapi\// { next }  # kernel headers of Debian 13
    /^\/usr\/include\/([a-z0-9_]+-linux-gnu[a-z0-9]*\/)?((bits|sys|asm|asm-generic|linux|gnu)\/|[a-z0-9_-]+[.]h$)/ { next }
    { print }'
}

case $check in
  headers)
    headers_with "$cxx"
    ;;
  headers_public)  # one of detail/ that does not stand alone harms nobody while these do
    headers_with "$cxx" -path '*/detail' -prune -o
    ;;
  headers_clang)
    find_clang
    headers_with "$clang"
    ;;
  headers_libcxx)
    find_clang
    echo '#include <version>' | "$clang" -stdlib=libc++ -x c++ -fsyntax-only - 2>/dev/null ||
      skip "hygiene $check needs libc++"
    headers_with "$clang -stdlib=libc++" -maxdepth 2  # those that users include
    ;;
  flags)
    smoke "$cxx" -O1 -fno-exceptions -fno-rtti
    smoke "$cxx" -O2 -ffast-math
    smoke "$cxx" -O0
    find_clang
    smoke "$clang" -O1
    ;;
  flags_strictest)  # consumer.plain has none at all
    smoke "$cxx" -O2 -march=native -ffast-math -fno-exceptions -fno-rtti
    ;;
  flags_clang)
    find_clang
    # Not -march=native: clang 19 warns of its own set of features on some machines.
    vectors=""
    [ "$(uname -m)" != x86_64 ] || vectors="-mavx2 -mfma -mf16c"
    # shellcheck disable=SC2086
    smoke "$clang" -O2 $vectors -ffast-math -fno-exceptions -fno-rtti
    ;;
  flags_libcxx)
    find_clang
    echo '#include <version>' | "$clang" -stdlib=libc++ -x c++ -fsyntax-only - 2>/dev/null ||
      skip "hygiene $check needs libc++"
    smoke "$clang" -O1 -stdlib=libc++
    ;;
  odr)
    case $(uname -m) in x86_64) ;; *) skip "hygiene odr links x86 units" ;; esac
    build() { "$cxx" -std=c++20 -Og -I include "$@"; }  # of little inlining, the linker finds more to merge
    build -c "$here/odr_main.cpp" -o "$work/main.o"
    build -c -DUNIT=plain "$here/odr_unit.cpp" -o "$work/plain.o"
    build -c -DUNIT=portable -DCHUNKATTN_ISA=portable -march=native "$here/odr_unit.cpp" -o "$work/portable.o"
    build -c -DUNIT=avx2 -mavx2 -mfma -mf16c "$here/odr_unit.cpp" -o "$work/avx2.o"
    build -c -DUNIT=avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c \
      "$here/odr_unit.cpp" -o "$work/avx512.o"
    (cd "$work" && "$cxx" main.o plain.o portable.o avx2.o avx512.o -pthread -o forward && ./forward) |
      tee "$work/forward.txt"
    for order in "avx512 avx2 portable plain" "portable avx512 plain avx2" "avx2 plain avx512 portable" \
      "plain avx512 avx2 portable"; do
      order="$order main"
      # What the linker merges is of the first unit that has it: one that cannot run here comes last.
      if grep -q '^avx512: SKIPPED' "$work/forward.txt"; then order="${order/avx512/} avx512"; fi
      # shellcheck disable=SC2086
      (cd "$work" && "$cxx" $(printf '%s.o ' $order) -pthread -o other && ./other) >"$work/other.txt"
      cmp "$work/forward.txt" "$work/other.txt" || fail "the order of linking changes the result: $order"
    done
    amx=""  # carried along where the compiler knows it
    if [ "$(uname -s)" = Linux ] && [ "$("$cxx" -dumpversion | cut -d. -f1)" -ge 12 ]; then amx=_amx; fi
    for isa in "plain portable_avx2_avx512$amx" "portable portable" "avx2 avx2_avx512$amx" "avx512 avx512$amx"; do
      grep -q "^${isa% *}: isa ${isa#* },\|^${isa% *}: SKIPPED" "$work/forward.txt" ||
        fail "unit ${isa% *} is not compiled for ${isa#* }"
    done
    "$cxx" -std=c++20 -I include -mavx2 -mfma -mf16c -mavxvnni -E "$here/odr_unit.cpp" |
      grep -q '"avx2_avx512_avxvnni' || fail "a unit with AVX-VNNI has its kernels where others have those without"
    # What the linker may merge with another unit's function uses nothing that the options do not promise.
    objdump -d -C --no-show-raw-insn "$work/plain.o" |
      awk '/^[0-9a-f]+ <.*>:$/ { f = $0 } /%[yzt]mm|vfmadd|%k[1-7]/ { if (!(f in seen)) print f; seen[f] = 1 }' |
      grep -v '::avx2::\|::avx512::' && fail "the functions above use AVX outside its namespace"
    echo "all orders of linking give the same bits"
    ;;
  refused)
    # What cannot compile the library gets one error that says so.
    cat >"$work/program.cpp" <<'END'
#include <chunkattn/chunkattn.hpp>
using namespace chunkattn;
PrefixTree<int> tree;
KvCache<Cpu, half> cache(tree, {1, 1, 64});
ChunkAttention<Cpu, 64> attention;
END
    for header in chunk_attention kv_cache prefix_tree; do
      echo "#include <chunkattn/$header.hpp>" >"$work/$header.cpp"
    done
    refused() {  # refused TEXT FILE "compiler and options"
      local said="$work/said" what="$3 $2.cpp"
      # shellcheck disable=SC2086
      if $3 -fsyntax-only -I include "$work/$2.cpp" 2>"$said"; then fail "$what compiles"; fi
      grep -qF "$1" "$said" || { head -20 "$said"; fail "$what does not say: $1"; }
      [ "$(wc -l <"$said")" -le 14 ] || { head -20 "$said"; fail "$what: $(wc -l <"$said") lines"; }
      echo "refused: $what"
    }
    refused_by() {  # refused_by COMPILER
      local file old="-U__GNUC__ -D__GNUC__=11"
      ! "$1" -dM -E -x c++ /dev/null | grep __clang__ >/dev/null || old="-U__clang_major__ -D__clang_major__=13"
      for file in program chunk_attention kv_cache prefix_tree; do
        refused "chunkattn needs C++20" $file "$1 -std=c++17"
      done
      refused "chunkattn needs g++ 12, clang 14" program "$1 -std=c++20 $old"
      case $(uname -m) in x86_64) refused "chunkattn needs a 64-bit target" program "$1 -std=c++20 -m32" ;; esac
    }
    refused_by "$cxx"
    find_clang
    refused_by "$clang"
    ;;
  compilers)
    # README's list of compilers is that of all other lists. Those of it that are here compile the quick
    # start without a warning.
    list=$(sed -nE 's/^\| a C\+\+20 compiler[^|]*\| (g\+\+ [0-9, ]+, clang [0-9, ]*[0-9]).*/\1/p' README.md)
    [ -n "$list" ] || fail "README.md has no list of compilers"
    gcc=${list%, clang*} gcc=${gcc#g++ } clang=${list#*clang }
    names=""
    for version in ${gcc//,/}; do names+="g++-$version "; done
    for version in ${clang//,/}; do names+="clang++-$version "; done
    says() { grep -qF -- "$2" "$1" || fail "$1 does not say: $2"; }
    says CONTRIBUTING.md "from $list at"
    says include/chunkattn/detail/support/config.hpp "needs g++ ${gcc%%,*}, clang ${clang%%,*}, or a newer"
    says tools/packages.sh "install g++ ${gcc%%,*} or clang ${clang%%,*} (or newer)"
    says cmake/packaging/conan/chunkattn/all/conanfile.py "{\"gcc\": \"${gcc%%,*}\", \"clang\": \"${clang%%,*}\"}"
    tested=$(sed -nE 's/.*\{cxx: ([^,]*),.*/\1/p' .github/workflows/ci.yml | tr '\n' ' ')
    [ "$tested" = "$names" ] || fail "README.md lists $names, .github/workflows/ci.yml tests $tested"
    tools/quick_start.sh README.md >"$work/quick_start.cpp"
    tools/quick_start.sh README.md first >"$work/first.cpp"
    for name in $names; do
      if ! command -v "$name" >/dev/null; then
        echo "left out: $name is not here"
        continue
      fi
      # shellcheck disable=SC2086
      "$name" -std=c++20 -fsyntax-only $strict -I include "$work/first.cpp" || fail "$name"
      # shellcheck disable=SC2086
      "$name" -std=c++20 -fsyntax-only $strict -I include "$work/quick_start.cpp" || fail "$name"
      echo "both programs compile with $name"
    done
    ;;
  exceptions)
    # Units with and without exceptions in one program: the linker must not merge their failures.
    "$cxx" -std=c++20 -O1 -I include -c "$here/exceptions_main.cpp" -o "$work/with.o"
    "$cxx" -std=c++20 -O1 -fno-exceptions -I include -c "$here/exceptions_unit.cpp" -o "$work/without.o"
    for order in "with.o without.o" "without.o with.o"; do
      # shellcheck disable=SC2086
      (cd "$work" && "$cxx" $order -pthread -o program)
      "$work/program" || fail "linked in the order $order, a failure is not caught: status $?"
      status=0
      "$work/program" without || status=$?
      [ $status = 3 ] || fail "linked in the order $order, the handler is not called: status $status"
    done
    echo "either order of linking: one unit throws, the other calls its handler"
    ;;
  lesser)  # what newcomers build is silent on a processor with AVX2 and no AVX-512, and has loops in registers
    echo 'int x;' | "$cxx" -march=haswell -x c++ -fsyntax-only - 2>/dev/null ||
      skip "hygiene lesser needs a compiler for x86-64"
    quiet() {  # quiet UNIT OUTPUT OPTIONS...: g++ prints notes about the ABI that -Werror lets pass
      # shellcheck disable=SC2086
      "$cxx" -std=c++20 -O3 -DNDEBUG $warnings -I . -I include -S "$1" -o "$2" "${@:3}" >"$work/log" 2>&1 ||
        { cat "$work/log"; fail "$1 with ${*:3}"; }
      [ ! -s "$work/log" ] || { cat "$work/log"; fail "$1 with ${*:3} is not silent"; }
    }
    for processor in x86-64 haswell; do
      quiet "$here/lesser_unit.cpp" "$work/lesser.s" -march=$processor
    done
    sed -nE '/^_Z11peak_of_fma.*:/,/cfi_endproc/{s/#.*//; /vfmadd.*%ymm/p}' "$work/lesser.s" >"$work/products"
    [ "$(wc -l <"$work/products")" -ge 12 ] || { cat "$work/products"; fail "fma_rate without 12 chains of ymm"; }
    if grep -F '(' "$work/products"; then fail "fma_rate has operands in memory"; fi
    for header in nlohmann/json.hpp utf8proc.h; do
      echo "#include <$header>" | "$cxx" -x c++ -E - >/dev/null 2>&1 || skip "hygiene lesser needs $header for examples/serve"
    done
    for unit in model/products model/gguf text/chat_template text/sentence_piece; do
      quiet examples/serve/$unit.cpp "$work/serve.s" -march=haswell -I examples/serve
    done
    echo "silent, and with 12 chains of sums in registers"
    ;;
  registers)
    # What the products' loops multiply and add up stays in registers, at -O3 and for one's own processor, too. A
    # vector that several products take is loaded once: on AVX2 a load each would be what binds. A quarter may have
    # an operand in memory, as the rescaled outputs after the loop do; a few constants may be on the stack.
    # (clang 14 has one function, of a tile's last eight lines, that puts 64 there; clang 19 none.)
    case $(uname -m) in x86_64) ;; *) skip "hygiene registers looks for instructions of x86" ;; esac
    if "$cxx" --version | grep -q clang; then skip "hygiene registers judges g++'s code"; fi
    cat >"$work/products.cpp" <<'END'
#include <chunkattn/chunk_attention.hpp>
using namespace chunkattn;
void attend(ChunkAttention<Cpu, 128>& attention, const LiveView& plan, const KvView<bfloat16>& pairs,
            const KvView<std::int8_t>& bytes, std::span<const float> q, std::span<float> out) {
  attention.run(pairs, plan, q, out);
  attention.run(bytes, plan, q, out);
}
END
    for options in -O3 "-O3 -march=znver3 -DCHUNKATTN_ISA=avx2"; do
      # shellcheck disable=SC2086
      "$cxx" -std=c++20 $options -I include -c "$work/products.cpp" -o "$work/products.o"
      objdump -d -C --no-show-raw-insn "$work/products.o" >"$work/products.txt"
      awk '
        function look() {
          if (products == 0) return
          functions++
          if (spills > 8) print spills " vectors put on the stack: " name
          if (name ~ /::avx2::/ && 4 * operands > products) print operands " of " products " products read memory: " name
        }
        /^[0-9a-f]+ <.*>:$/ { look(); name = $0; products = operands = spills = 0
                              hot = /::avx(2|512)::(dot|tile)_(logits|values)</ }
        !hot { next }
        /vfmadd|vpmaddwd|vpdpbusd|vdpbf16ps/ { products++; if (/\(/) operands++ }
        /vmov[a-z0-9]+ +%[xyz]mm[0-9]+,.*\(%r[bs]p/ { spills++ }
        END { look(); if (functions < 8) print "only " functions " functions with products" }' "$work/products.txt" >"$work/log"
      if [ -s "$work/log" ]; then cat "$work/log"; fail "the functions above, compiled with $options"; fi
      echo "products in registers: $options"
      [[ $options != -O3 ]] || cp "$work/products.txt" "$work/plain.txt"
    done
    # A plain build carries the matrix unit's instructions, in the avx512 kernels alone.
    [ "$(uname -s)" = Linux ] || { echo "left out: AMX is for Linux"; exit 0; }
    for instruction in ldtilecfg tilerelease tilezero tileloadd tileloaddt1 tilestored tdpbf16ps; do
      grep -qw "$instruction" "$work/plain.txt" || fail "$instruction does not appear"
    done
    awk '/^[0-9a-f]+ <.*>:$/ { f = $0 } /%tmm|tilecfg|tilerelease/ { if (!(f in seen)) print f; seen[f] = 1 }' \
      "$work/plain.txt" | grep -v '::avx512::' && fail "the functions above use tiles outside their namespace"
    echo "tiles are used in $(grep -c 'tdpbf16ps' "$work/plain.txt") products, all in the avx512 kernels"
    ;;
  dots)
    # A plain build carries dot products, too; and no function uses them but those of the products, nor vectors of AVX
    # outside the sets' namespaces.
    case $(uname -m) in x86_64) ;; *) skip "hygiene dots looks for instructions of x86" ;; esac
    cat >"$work/dots.cpp" <<'END'
#include <chunkattn/chunk_attention.hpp>
using namespace chunkattn;
void attend(ChunkAttention<Cpu, 80>& attention, const LiveView& plan, const KvView<bfloat16>& pairs,
            const KvView<std::int8_t>& bytes, std::span<const float> q, std::span<float> out) {
  attention.run(pairs, plan, q, out);
  attention.run(bytes, plan, q, out);
}
END
    "$cxx" -std=c++20 -O2 -I include -c "$work/dots.cpp" -o "$work/dots.o"
    objdump -d -C --no-show-raw-insn "$work/dots.o" >"$work/dots.txt"
    functions_with() { awk -v what="$1" '/^[0-9a-f]+ <.*>:$/ { f = $0 } $0 ~ what { print f }' "$work/dots.txt" | sort -u; }
    for instruction in vpdpbusd vdpbf16ps; do
      grep -qw "$instruction" "$work/dots.txt" || fail "$instruction does not appear"
    done
    functions_with vpdpbusd | grep -v '::avx512::dot_.*ByteUnit' && fail "the functions above use vpdpbusd"
    functions_with vdpbf16ps | grep -v '::avx512::dot_.*PairUnit' && fail "the functions above use vdpbf16ps"
    functions_with '%[yzt]mm|vfmadd|%k[1-7]' | grep -v '::avx2::\|::avx512::' &&
      fail "the functions above use AVX outside its namespace"
    echo "dot products are used in $(grep -c 'vpdpbusd\|vdpbf16ps' "$work/dots.txt") places, all in products of the avx512 kernels"
    ;;
  variants)
    # A user's variant is part of the kernels: their loops over keys call nothing, with any vectors.
    cat >"$work/variant.cpp" <<'END'
#include <chunkattn/chunk_attention.hpp>
struct Mine {
  int near;
  auto logit(auto s, chunkattn::lanes::At at) const { return s + 0.1f * tanh(s) * (at.kv_idx - at.q_idx); }
  auto visible(chunkattn::lanes::At at) const {
    return at.q_idx - at.kv_idx < near ||
           chunkattn::lanes::per_lane([n = near](chunkattn::LogitIndex p) { return p.kv_idx % n == p.head; });
  }
};
void attend(chunkattn::ChunkAttention<chunkattn::Cpu, 16>& attention, const chunkattn::LiveView& plan,
            const chunkattn::KvView<float>& kv, std::span<const float> q, std::span<float> out) {
  attention.run(kv, plan, chunkattn::combine(Mine{3}, chunkattn::SlidingWindow{9}), q, out);
}
END
    "$cxx" -std=c++20 -O2 -I include -c "$work/variant.cpp" -o "$work/variant.o"
    objdump -d -C --no-show-raw-insn "$work/variant.o" |
      awk '/^[0-9a-f]+ <.*>:$/ { f = $0; inside = /(stream_softmax|tile_softmax)<.*Mine/; kernels += inside }
           inside && /\tcall|\tbl / { print f; print; calls = 1 }
           END { print kernels + 0 " kernels with a variant"; exit calls || kernels < 4 }' ||
      fail "the kernels above call something, or there are none"
    ;;
  macros)
    # Every macro of ours carries the prefix,
    if grep -rnE '^ *# *define +[A-Za-z_0-9]+' include | grep -vE 'define +CHUNKATTN_'; then
      fail "the macros above lack the prefix CHUNKATTN_"
    fi
    # and other people's macros do no harm, once the system's own headers are in.
    {
      system_headers
      # logging and test frameworks, X11, Qt, GNU modes, system headers and <windows.h>
      for name in 'CHECK(x)' 'ASSERT(x)' 'LOG(x)' 'ERROR' 'DEBUG' 'LIKELY(x)' 'UNLIKELY(x)' 'INLINE' 'PACKED' \
        'Status' 'None' 'Bool' 'True' 'False' 'Success' 'emit' 'signals' 'slots' 'foreach' 'forever' \
        'major(x)' 'minor(x)' 'linux' 'unix' 'near' 'far' 'small' 'interface' 'IN' 'OUT' 'CONST' 'VOID' 'DELETE' \
        'HEAD_DIM' 'WARP_SIZE' 'CHUNK_SIZE' 'BLOCK_SIZE' 'HOST_DEVICE' 'CEIL_DIV(a, b)'; do
        echo "#define $name @ a header of chunkattn uses this name @"
      done
      echo '#include <chunkattn/chunkattn.hpp>'
    } >"$work/hostile.cpp"
    "$cxx" -std=c++20 -fsyntax-only -I include "$work/hostile.cpp" || fail "a user's macro breaks a header"
    # <windows.h> without NOMINMAX has two with parameters; libstdc++ takes them away where it is included first.
    {
      system_headers
      echo '#define min(a, b) (((a) < (b)) ? (a) : (b))'
      echo '#define max(a, b) (((a) > (b)) ? (a) : (b))'
      find include -name '*.hpp' ! -path '*/isa/*' | sort | sed -E 's~include/(.*)~#include <\1>~'
      printf '#if !defined(min) || !defined(max)\n#error a header took the macros away\n#endif\n'
    } >"$work/min_max.cpp"
    "$cxx" -std=c++20 -fsyntax-only -I include "$work/min_max.cpp" || fail "min or max as a macro breaks a header"
    if (find_clang >/dev/null && echo '#include <version>' | "$clang" -stdlib=libc++ -x c++ -fsyntax-only - 2>/dev/null); then
      find_clang
      # Here they come before the standard library, as a user's may.
      sed '/^#if __has_include/,/^#endif/d' "$work/min_max.cpp" >"$work/min_max_first.cpp"
      "$clang" -std=c++20 -stdlib=libc++ -fsyntax-only -I include "$work/min_max_first.cpp" ||
        fail "min or max as a macro breaks a header with $clang and libc++"
    else
      echo "left out: min and max as macros before libc++, which is not here"
    fi
    echo "no foreign macro breaks the headers, no macro of ours lacks the prefix"
    ;;
  includes)
    # A user needs a compiler and nothing else. First, that this check sees what it should:
    mkdir -p "$work/planted/nlohmann" "$work/planted/engine"
    touch "$work/planted/nlohmann/json.hpp" "$work/planted/engine/engine.h"
    printf '#include <%s>\n' vector nlohmann/json.hpp engine/engine.h >"$work/planted.cpp"
    [ "$(foreign "$work/planted.cpp" -I "$work/planted" | wc -l)" = 2 ] ||
      fail "of two foreign headers this check names: $(foreign "$work/planted.cpp" -I "$work/planted")"
    echo '#include <chunkattn/chunkattn.hpp>' >"$work/umbrella.cpp"
    foreign "$work/umbrella.cpp" >"$work/foreign" || fail "the umbrella header cannot be preprocessed"
    while read -r file; do
      echo "FAILED: chunkattn/chunkattn.hpp includes $file, which is neither ours nor the system's:"
      grep -rn "#include.*${file##*/}[\">]" include || true
    done <"$work/foreign"
    [ ! -s "$work/foreign" ] || exit 1
    echo "$(grep -c '^# 1 "' "$work/preprocessed") includes, each of them ours or the system's"
    ;;
  namespace)
    # The headers can be vendored inside another namespace: they name nothing as ::chunkattn and add
    # nothing to std or to the global namespace.
    {
      system_headers
      echo 'namespace engine {'
      echo '#include <chunkattn/chunkattn.hpp>'
      echo '}'
      echo '#undef main'
      echo 'namespace chunkattn { struct PrefixTree; }  // the name outside is free'
      echo 'engine::chunkattn::PrefixTree<int, 4> tree;'
      echo 'int main() { auto s = tree.insert({}); }'
    } >"$work/wrapped.cpp"
    sed -i 's/auto s = tree.insert({});/const int t[]{1}; auto s = tree.insert(t);/' "$work/wrapped.cpp"
    "$cxx" -std=c++20 -fsyntax-only -I include "$work/wrapped.cpp" || fail "the headers cannot be wrapped"
    # Nothing we define is outside of chunkattn.
    echo '#include <chunkattn/chunkattn.hpp>' >"$work/empty.cpp"
    "$cxx" -std=c++20 -O0 -c -I include "$work/empty.cpp" -o "$work/empty.o"
    if nm -C --defined-only "$work/empty.o" | grep -E '^[0-9a-f]* [A-TV-Z] ' | grep -v 'chunkattn::\|std::\|__gnu'; then
      fail "the symbols above are outside of namespace chunkattn"
    fi
    echo "the headers can be wrapped in a namespace, and define nothing outside their own"
    ;;
  quick_start)
    forget_write() {  # forget_write NAME FILE: without its write() the program says what is missing
      sed '/attention\.write/d' "$2" >"$work/forgotten.cpp"
      "$cxx" -std=c++20 -O0 -DCHUNKATTN_ISA=portable -I include "$work/forgotten.cpp" -o "$work/forgotten" -pthread
      if "$work/forgotten" >"$work/log" 2>&1; then fail "README's $1 runs without write()"; fi
      grep -q 'layer = 0: expected step 1 to write it before run()' "$work/log" || { cat "$work/log"; exit 1; }
    }
    "$root/tools/quick_start.sh" README.md first >"$work/first.cpp"
    # shellcheck disable=SC2086
    "$cxx" -std=c++20 -O0 $strict -I include "$work/first.cpp" -o "$work/first" -pthread
    "$work/first" >"$work/printed" || fail "README's first program does not run"
    grep -qxFf "$work/printed" README.md || fail "README's first program prints what the README does not show"
    forget_write "first program" "$work/first.cpp"
    "$root/tools/quick_start.sh" README.md >"$work/quick_start.cpp"
    lines=$(wc -l <"$work/quick_start.cpp")
    [ "$lines" -le 40 ] || fail "README's quick start has $lines lines, at most 40 are allowed"
    # shellcheck disable=SC2086
    "$cxx" -std=c++20 -O2 $strict -I include "$work/quick_start.cpp" -o "$work/quick_start" -pthread
    "$work/quick_start" >"$work/printed" || fail "README's quick start does not run"
    awk '/It prints$/ { marked = 1 } marked && /^```/ { if (inside) exit; inside = 1; next } inside' \
      README.md >"$work/shown"
    ! grep -E '(g|c)\+\+ -std=' README.md | grep -v -e ' -O2 ' || fail "README's command above lacks -O2"
    diff "$work/shown" "$work/printed" || fail "README's quick start does not print what the README shows (<)"
    forget_write "quick start" "$work/quick_start.cpp"
    echo "README's quick start: $lines lines, builds, runs and prints what the README shows"
    ;;
  amalgamated)
    "$root/tools/amalgamate.sh" >"$work/first.hpp"
    (cd / && "$root/tools/amalgamate.sh") >"$work/second.hpp"
    cmp "$work/first.hpp" "$work/second.hpp" || fail "the single header is not reproducible"
    mkdir -p "$work/single/chunkattn"
    cp "$work/first.hpp" "$work/single/chunkattn/chunkattn.hpp"
    "$root/tools/quick_start.sh" README.md >"$work/quick_start.cpp"
    # shellcheck disable=SC2086
    "$cxx" -std=c++20 -O0 $strict -I "$work/single" "$work/quick_start.cpp" -o "$work/quick_start" -pthread
    "$work/quick_start" || fail "the quick start does not run from the single header"
    echo "single header: $(wc -l <"$work/first.hpp") lines, reproducible, the quick start runs from it"
    ;;
  version)
    "$root/tools/check_version.sh"
    ;;
  *)
    echo "unknown check $check"
    exit 2
    ;;
esac
