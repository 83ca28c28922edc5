#!/usr/bin/env bash
# run.sh CHECK WORK_DIR: what ./dev and the script tests say where few tools are installed.
# Exit 0: passed. 77: a tool is missing, said aloud. Anything else: failed.
set -euo pipefail
check=$1
work=$2
root=$(cd "$(dirname "$0")/../../.." && pwd)
rm -rf "$work"
mkdir -p "$work"
work=$(cd "$work" && pwd)

fail() { echo "FAILED: $*"; exit 1; }
skip() { echo "SKIPPED: $*"; exit 77; }

# says FILE TEXT: some line of the file has this text.
says() { grep -qF -- "$2" "$1" || { cat "$1"; fail "this lacks: $2"; }; }

case $check in
  summary)  # ./dev test runs what it is asked to, and names in the end what failed and what was skipped
    for header in fmt/core.h CLI/CLI.hpp nlohmann/json.hpp xxhash.h utf8proc.h oneapi/dnnl/dnnl.h httplib.h zmq.hpp; do
      echo "#include <$header>" | "${CXX:-c++}" -x c++ -E - >/dev/null 2>&1 ||
        skip "dev summary needs $header, or ./dev would install it"
    done
    mkdir "$work/tools"
    cp "$root/dev" "$work/"
    cp "$root/tools/packages.sh" "$root/tools/tests.sh" "$work/tools/"
    cat >"$work/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.22)
project(summary LANGUAGES NONE)
enable_testing()
add_test(NAME good COMMAND bash -c "echo 'summary: 7 of what good did'")
add_test(NAME bad.one COMMAND false)
add_test(NAME bad.two COMMAND no_such_program)
add_test(NAME left.out COMMAND bash -c "echo 'SKIPPED: left out needs a tool'; exit 77")
set_tests_properties(left.out PROPERTIES SKIP_RETURN_CODE 77)
END
    cat >"$work/CMakePresets.json" <<'END'
{"version": 3, "configurePresets": [
  {"name": "fast", "binaryDir": "${sourceDir}/build/${presetName}"},
  {"name": "test", "inherits": "fast"}]}
END
    if JOBS=2 "$work/dev" test >"$work/log" 2>&1; then fail "./dev test succeeded although a test failed"; fi
    says "$work/log" "    ./dev test -R '^bad.one\$'"
    [ -e "$work/build/fast" ] && [ ! -e "$work/build/test" ] || fail "./dev test is not the fast run"
    if JOBS=2 "$work/dev" test full >"$work/log" 2>&1; then fail "./dev test full succeeded although a test failed"; fi
    sed -n '/^SKIPPED/,$p' "$work/log" >"$work/closing"
    says "$work/closing" "SKIPPED, not passed: 1 test"
    says "$work/closing" "left.out: left out needs a tool"
    says "$work/closing" "7 of what good did"
    says "$work/closing" "FAILED: 2 tests"
    says "$work/closing" "bad.one (Failed)"
    says "$work/closing" "bad.two (Not Run)"
    says "$work/closing" "    ./dev test bad.one"
    tail -n 1 "$work/log" | grep -qE '^[0-9]+% tests passed' || fail "the last line is not ctest's summary"
    if ! JOBS=2 "$work/dev" test -R '^good$' >"$work/log" 2>&1; then cat "$work/log"; fail "./dev test -R"; fi
    if grep -q 'FAILED\|SKIPPED' "$work/log"; then fail "a failure is named where there is none"; fi
    if ! JOBS=2 "$work/dev" test good 'left.*' >"$work/log" 2>&1; then cat "$work/log"; fail "./dev test NAME"; fi
    says "$work/log" "left.out: left out needs a tool"
    says "$work/log" "out of 2"
    if JOBS=2 "$work/dev" test badone >"$work/log" 2>&1; then fail "./dev test of no test succeeded"; fi
    says "$work/log" "no test is named 'badone'; the nearest: bad.one bad.two good"
    if JOBS=2 "$work/dev" sanitize msan >"$work/log" 2>&1; then fail "./dev sanitize msan succeeded"; fi
    says "$work/log" "expected asan or tsan, not 'msan'"
    sed 's/^/  /' "$work/closing"
    ;;
  budgets)  # each number rises with what it counts, whatever form it has, and fails above its budget
    command -v python3 >/dev/null || skip "dev budgets needs python3"
    mkdir -p "$work/docs"
    cp -r "$root/tools" "$root/include" "$root/README.md" "$work/"
    cp "$root"/docs/*.md "$work/docs/"
    of() { sed -n "s/^$2: \([0-9]*\) .*/\1/p" "$work/$1"; }
    python3 "$work/tools/check_budgets.py" >"$work/before" || { cat "$work/before"; exit 1; }
    n=0
    rises() {  # rises BUDGET BY FILE TEXT: by so many, where the text is appended to the file
      local before after
      cp "$work/$3" "$work/file"
      printf '%s\n' "$4" >>"$work/$3"
      python3 "$work/tools/check_budgets.py" >"$work/after" || { cat "$work/after"; exit 1; }
      cp "$work/file" "$work/$3"
      before=$(of before "$1") after=$(of after "$1")
      [ $((after - before)) = "$2" ] || fail "$1 rises by $((after - before)), expected $2, for: $4"
      n=$((n + 1))
    }
    header=include/chunkattn/tree_options.hpp
    within() { rises "$1" "$2" $header "$(printf 'CHUNKATTN_NAMESPACE_BEGIN\n%s\nCHUNKATTN_NAMESPACE_END' "$3")"; }
    within public_names 1 'struct Added;'
    within public_names 3 'struct Added { struct Nested { int field = 3; }; };'
    within public_names 3 'struct Added { int a = 1, b{2}; };'
    within public_names 3 'enum class Added : int { one = 1, two };'
    within public_names 1 'template <class T> requires(sizeof(T) > 1) std::pair<T, int> added(T x = {}); void added();'
    within public_names 1 'constexpr int added = 1 << 3;'
    within public_names 2 'class Added { public: Added() : x_(1) {} ~Added(); void f() const; void f(); private: int x_; void g(); };'
    within public_names 0 'namespace detail { struct Added { int field; }; }'
    rises tree_lines 1 $header $'int x;\n\n  // a comment'
    rises program_lines 1 include/chunkattn/detail/kv/checks.hpp 'int x;'
    rises header_lines 1 include/chunkattn/cuda.cuh 'int x;'
    rises docs_words 3 docs/cache.md 'some more words'
    for name in tree_lines public_names docs_words; do
      sed "s/^$name .*/$name $(($(of before $name) - 1))/" "$root/tools/budgets.txt" >"$work/tools/budgets.txt"
      if python3 "$work/tools/check_budgets.py" >"$work/log"; then fail "$name may be above its budget"; fi
      says "$work/log" "FAILED: $name is above its budget"
    done
    cat "$work/before"
    echo "budgets: $n additions counted as they should be"
    ;;
  compile_time)  # it compares what is compiled, not how fast the processor is
    # A compiler that only takes its time: so much per unit, and SLOW times as long.
    cat >"$work/compiler" <<'END'
#!/usr/bin/env bash
case " $* " in
  *compile_time_unit.cpp*) work=10 ;;
  *) work=$PROGRAM ;;
esac
exec awk -v n=$((work * SLOW * 400000)) 'BEGIN { while (n-- > 0) sum += n }'
END
    chmod +x "$work/compiler"
    for slow in 1 3; do
      PROGRAM=32 SLOW=$slow CXX=$work/compiler "$root/tools/compile_time.sh" >"$work/log" 2>&1 ||
        { cat "$work/log"; fail "compile_time fails where all takes $slow times as long"; }
      cat "$work/log"
      if PROGRAM=64 SLOW=$slow CXX=$work/compiler "$root/tools/compile_time.sh" >"$work/log" 2>&1; then
        cat "$work/log"
        fail "compile_time passes what costs twice as much"
      fi
      says "$work/log" "FAILED: above the budget"
    done
    ;;
  bare)  # without python3, nvcc, clang and pkg-config their tests are skipped, with a reason
    mkdir "$work/bin"
    for tool in bash sh env cat grep sed awk sort find xargs mkdir rm mv cp cut head tail tr wc uname nproc \
      dirname basename realpath mktemp cmp cmake; do
      ln -s "$(command -v $tool)" "$work/bin/$tool"
    done
    expect_skipped() {
      local status=0
      env -u CHUNKATTN_CLANG NVCC= PATH="$work/bin" bash "$@" >"$work/log" 2>&1 || status=$?
      [ $status = 77 ] || { cat "$work/log"; fail "$*: exit $status, not 77"; }
      grep '^SKIPPED: ' "$work/log" || { cat "$work/log"; fail "$*: no reason"; }
    }
    expect_skipped "$root/tests/cuda/run.sh"
    for mode in headers_clang headers_libcxx flags_clang flags_libcxx; do
      expect_skipped "$root/tests/project/hygiene/run.sh" $mode "$work/hygiene"
    done
    expect_skipped "$root/tests/project/consumer/run.sh" pkg_config "$work/consumer"
    [ -x /usr/local/cuda/bin/nvcc ] || for mode in cuda nvcc; do
      expect_skipped "$root/tests/project/consumer/run.sh" $mode "$work/consumer"
    done
    # CMake by itself looks for make alone.
    if command -v ninja >/dev/null; then
      for tool in c++ as ld ninja; do ln -s "$(command -v $tool)" "$work/bin/$tool"; done
      (cd "$root" && env -i CHUNKATTN_VERSION= PATH="$work/bin" bash -c \
        'source tools/packages.sh; need make; bash tests/project/consumer/run.sh find_package "$0"' "$work/ninja") \
        >"$work/log" 2>&1 || { cat "$work/log"; fail "a package cannot be tried with ninja alone"; }
    else
      echo "ninja not found: its use without make was NOT tried"
    fi
    # A bare Debian's python3 and python3-venv have pip within environments only.
    mkdir "$work/python"
    cat >"$work/python/python3" <<'END'
#!/bin/sh
[ "$2" = venv ] || { echo "No module named $2"; exit 1; }
mkdir -p "$3/bin"
printf '#!/bin/sh\necho "asked for $*"\nexit 1\n' >"$3/bin/pip"
chmod +x "$3/bin/pip"
END
    chmod +x "$work/python/python3"
    PATH=$work/python:$PATH LLAMA_CPP_DIR= bash "$root/examples/ggml/proof.sh" "$work/ggml" quick >"$work/log" 2>&1 ||
      [ $? = 77 ] || { cat "$work/log"; fail "examples/ggml/proof.sh does not skip"; }
    says "$work/log" "asked for download"
    if grep -rnE 'python3 -m pip' "$root/dev" "$root/tools" "$root/examples" --include='*.sh' --include=dev; then
      fail "python3 has no pip outside of an environment"
    fi
    ;;
  help)  # each verb is listed, and what is listed is a verb
    "$root/dev" help >"$work/help"
    sed -nE 's/^verb_([a-z0-9_]+)\(\).*/\1/p' "$root/dev" | sort >"$work/verbs"
    sed -nE 's/^  ([a-z0-9_]+)  +.*/\1/p' "$work/help" | sort >"$work/listed"
    diff "$work/verbs" "$work/listed" || fail "left: the verbs of ./dev; right: those its help lists"
    sed -nE 's/^check_([a-z0-9_]+)\(\).*/\1/p' "$root/dev" >"$work/checks"
    while read -r name; do
      says "$work/help" "$name"
    done <"$work/checks"
    # ./dev VERB --help: its lines of that, and nothing is done. What follows -- is for what is behind the verb.
    mkdir -p "$work/copy/tools"
    cp "$root/dev" "$work/copy/"
    cp "$root"/tools/{packages,tests}.sh "$work/copy/tools/"
    echo 'need() { touch needed; }; exec() { echo "runs $*"; }' >>"$work/copy/tools/tests.sh"
    sed -n '/^  [a-z]/,/^$/p' "$work/help" | grep . >"$work/lines"
    for option in -h --help; do
      awk '/^  [a-z]/ { print $1 }' "$work/lines" | while read -r verb; do "$work/copy/dev" "$verb" $option; done >"$work/each"
      diff "$work/lines" "$work/each" || fail "left: ./dev help; right: ./dev VERB $option of each verb"
    done
    [ ! -e "$work/copy/needed" ] || fail "./dev VERB --help asks for tools"
    "$work/copy/dev" release_archive -- --help >"$work/said"
    says "$work/said" "runs tools/release_archive.sh --help"
    status=0
    "$root/dev" nonsense >"$work/log" 2>&1 || status=$?
    [ $status = 1 ] || fail "an unknown verb leaves with $status"
    head -n 1 "$work/log" >"$work/first"
    says "$work/first" "unknown verb 'nonsense'"
    says "$work/log" "usage: ./dev VERB"
    longest=$(awk '{ if (length > n) n = length } END { print n }' "$work/help")
    [ "$longest" -le 80 ] || fail "a line of the help has $longest columns"
    echo "$(wc -l <"$work/verbs") verbs and $(wc -l <"$work/checks") checks, each of them listed"
    ;;
  fast)  # the tests of the full run, in the build folder $3, are those of the fast run and of not_fast.txt
    "${CMAKE:-cmake}" --preset fast -S "$root" -B "$work/build" -G "${GENERATOR:-Unix Makefiles}" >"$work/log" 2>&1 ||
      { cat "$work/log"; fail "the fast run cannot be configured"; }
    # From a folder of its own: ctest empties the log of where it runs, and a run of $3 is under way.
    mkdir -p "$work/names"
    names_in() {
      echo "subdirs(\"$1\")" >"$work/names/CTestTestfile.cmake"
      (cd "$work/names" && ctest -N) | sed -nE 's/^ +Test +#[0-9]+: ([^ ]+).*/\1/p' | sort
    }
    names_in "$3" >"$work/full"
    names_in "$work/build" >"$work/fast"
    comm -13 "$work/full" "$work/fast" >"$work/gone"
    [ ! -s "$work/gone" ] || { cat "$work/gone"; fail "these are in the fast run and not in the full one"; }
    comm -23 "$work/full" "$work/fast" >"$work/left"
    wrong=0
    cp "$work/left" "$work/unexplained"
    while read -r glob reason; do
      case $glob in "" | "#"*) continue ;; esac
      pattern="^$(sed 's/^?//; s/[.]/\\./g; s/[*]/.*/g' <<<"$glob")\$"
      [ -n "$reason" ] || { echo "$glob: no reason"; wrong=1; }
      if grep -qE "$pattern" "$work/fast"; then echo "$glob: is in the fast run"; wrong=1; fi
      if [[ $glob != \?* ]] && ! grep -qE "$pattern" "$work/left"; then echo "$glob: no such test"; wrong=1; fi
      grep -vE "$pattern" "$work/unexplained" >"$work/rest" || true
      mv "$work/rest" "$work/unexplained"
    done <"$root/tests/not_fast.txt"
    if [ -s "$work/unexplained" ]; then
      sed 's/$/: neither in tests\/fast.cmake nor in tests\/not_fast.txt/' "$work/unexplained"
      wrong=1
    fi
    [ $wrong = 0 ] || fail "the lists of the fast run"
    echo "$(wc -l <"$work/full") tests: $(wc -l <"$work/fast") in the fast run, $(wc -l <"$work/left") left out for a reason"
    ;;
  jobs)  # no more compilers at once than processors, or than a container's quota allows
    . "$root/tools/packages.sh"
    set -- "64 64" "64 64 max 100000" "2 64 200000 100000" "2 64 250000 100000" "1 64 50000 100000" "8 8 900000 100000" "64 64 junk" "64 64 100000" "64 64 -1 100000"
    for case in "$@"; do
      read -r expected processors cpu_max <<<"$case"
      found=$(jobs_for "$processors" "$cpu_max")
      [ "$found" = "$expected" ] || fail "$processors processors, cpu.max '$cpu_max': $found jobs, expected $expected"
    done
    mkdir -p "$work/v2" "$work/v1/cpu" "$work/none"
    echo "200000 100000" >"$work/v2/cpu.max"
    echo 150000 >"$work/v1/cpu/cpu.cfs_quota_us"
    echo 50000 >"$work/v1/cpu/cpu.cfs_period_us"
    for case in "v2 200000 100000" "v1 150000 50000" "none "; do
      [ "$(cpu_quota "$work/${case%% *}")" = "${case#* }" ] || fail "$case: $(cpu_quota "$work/${case%% *}")"
    done
    grep -q '^jobs() .*jobs_for .*(cpu_quota)' "$root/dev" || fail "./dev does not ask"
    ;;
  lesser)  # another instruction set, asked for: all is compiled for it, and what is compiled for one keeps its own
    [ "$(uname -m)" = x86_64 ] || skip "dev lesser needs an x86-64"
    "${CMAKE:-cmake}" --preset test -S "$root" -B "$work/build" -G "${GENERATOR:-Unix Makefiles}" \
      -DCHUNKATTN_CUDA=OFF -DCHUNKATTN_ONLY_ISA=avx2 >"$work/log" 2>&1 || { cat "$work/log"; fail "cannot be configured"; }
    if grep -qF -- -march=native "$work/build/compile_commands.json"; then fail "something is compiled for this machine"; fi
    for name in element attention_variants; do
      for isa in portable avx2; do
        grep "^set_tests_properties.*[([]${name}_test_$isa[] ]" "$work/build/tests/CTestTestfile.cmake" |
          grep -qE 'ENVIRONMENT "(.*;)?CHUNKATTN_CPU_ISA="' || fail "${name}_test_$isa runs as the user's variable says"
      done
    done
    ;;
  release)  # tools/release.sh tags what the changelog describes, and refuses everything else
    git -C "$root" rev-parse 2>/dev/null || skip "dev release needs git and a clone"
    mkdir "$work/tree"
    (cd "$root" && git ls-files -z | xargs -0 tar -c --ignore-failed-read 2>/dev/null) | tar -x -C "$work/tree"
    cp "$root/tools/release.sh" "$work/tree/tools/"  # also where it is not committed yet
    cd "$work/tree"
    git init -q
    git config user.name test
    git config user.email test@localhost
    release() {  # STATUS TEXT
      local status=0
      tools/release.sh >"$work/log" 2>&1 || status=$?
      [ $status = "$1" ] || { cat "$work/log"; fail "release.sh: exit $status, not $1"; }
      says "$work/log" "$2"
    }
    version=$(sed -n 's/^#define CHUNKATTN_VERSION_[MP][A-Z]* \([0-9]*\)$/\1/p' include/chunkattn/version.hpp | paste -sd.)
    # A section of our own at the top: the repository may be between two releases.
    sed -i "0,/^## /s//## $version\n\n### New\n\n- A line of the test.\n\n## /" CHANGELOG.md
    git add -A
    git commit -q -m first
    cp CHANGELOG.md "$work/changelog"
    sed -i "0,/^## .*/s//## 99.0.0/" CHANGELOG.md
    release 1 "CHANGELOG.md begins with version 99.0.0"
    sed "/^### New/,/^- A line/d" "$work/changelog" >CHANGELOG.md
    release 1 "CHANGELOG.md says nothing of version $version"
    cp "$work/changelog" CHANGELOG.md
    sed -i 's/^version: .*/version: 99.0.0/' CITATION.cff
    release 1 "CITATION.cff does not name version $version"
    git checkout -q CITATION.cff
    echo >>README.md
    release 1 "not committed"
    git checkout -q README.md
    [ -z "$(git tag)" ] || fail "a refused release left a tag: $(git tag)"
    release 0 "as v$version"
    git tag -l --format='%(contents)' "v$version" >"$work/message"
    says "$work/message" "### New"
    says "$work/message" "- A line of the test."
    [ "$(grep -c '^## ' "$work/message")" = 0 ] || fail "the tag describes other versions, too"
    [ "$(git rev-parse "v$version^{commit}")" = "$(git rev-parse HEAD)" ] || fail "the tag is not of this commit"
    release 1 "the tag v$version exists already"
    ;;
  compare)  # each version is called by its own program, whatever it calls things; what is measured has to be the same
    git --version >/dev/null 2>&1 || skip "dev compare needs git"
    command -v python3 >/dev/null || skip "dev compare needs python3"
    mkdir -p "$work/tree/tools" "$work/tree/bench/compare" "$work/tree/include/chunkattn"
    cp "$root/tools/compare.py" "$work/tree/tools/"
    cd "$work/tree"
    git init -q
    git config user.name test
    git config user.email test@localhost
    version() {  # version NAME: the library calls its function so
      echo "inline const char* $1() { return \"$1\"; }" >include/chunkattn/chunkattn.hpp
      printf '#include "steps.hpp"\n#include <chunkattn/chunkattn.hpp>\nextern "C" __attribute__((%s)) Steps make_steps() { return %s(); }\n' \
        'visibility("default")' "$1" >bench/compare/steps.cpp
      git add . && git commit -q -m "$1"
    }
    echo 'using Steps = int;  // in the beginning' >bench/compare/steps.hpp
    version oldest
    echo 'using Steps = const char*;' >bench/compare/steps.hpp
    cat >bench/compare/main.cpp <<'END'
#include <cstdio>
#include <dlfcn.h>
int main(int, char** argv) {
  for (int i = 1; i <= 2; ++i) {
    auto make = reinterpret_cast<const char* (*)()>(dlsym(dlopen(argv[i], RTLD_NOW), "make_steps"));
    std::printf("calls %s\n", make());
  }
}
END
    version finished
    comparable=$(git rev-parse --short HEAD)
    sed -i 's,$,  // in other words,' bench/compare/steps.hpp
    version finish
    python3 tools/compare.py $comparable --flags=-O0 >"$work/log" 2>&1 || { cat "$work/log"; fail "compare of a version with another name"; }
    says "$work/log" "calls finished"
    says "$work/log" "calls finish"
    if python3 tools/compare.py HEAD~2 --flags=-O0 >"$work/log" 2>&1; then fail "compare of what measures something else"; fi
    says "$work/log" "the oldest that can be compared is $comparable of "
    ;;
  gpu)  # tools/gpu.sh on a machine whose GPU and tools are imitated: what is run, left and said
    tree=$work/tree
    mkdir -p "$tree/tools" "$tree/tests/cuda" "$tree/tests/support" "$tree/include" "$tree/bench/peers" \
      "$tree/examples/serve" "$tree/.gpu-pack/data/models" "$work/bin"
    cp "$root/tools/gpu.sh" "$tree/tools/"
    touch "$tree/tests/main.cpp" "$tree/bench/peers/gpu_peers.py" "$tree/.gpu-pack/data/models/stories260K.bin"
    imitate() { { echo '#!/usr/bin/env bash'; cat; } >"$work/bin/$1"; chmod +x "$work/bin/$1"; }
    # What it "compiles" prints its arguments and leaves with 3 where its name is in BROKEN.
    imitate nvcc <<'END'
[ "$1" = --version ] && { echo "Cuda compilation tools, release 13.0, V13.0.88"; exit; }
echo "nvcc $*" >>"$CALLS"
while [ "$1" != -o ]; do shift; done
case " ${UNBUILDABLE:-} " in *" $(basename "$2") "*) echo "error: no such header"; exit 1 ;; esac
printf '#!/usr/bin/env bash\necho "%s $*"\ncase " ${BROKEN:-} " in *" %s "*) exit 3 ;; esac\n' "$(basename "$2")" "$(basename "$2")" >"$2"
chmod +x "$2"
END
    imitate g++ <<<'while [ "$1" != -o ]; do shift; done; touch "$2"'
    imitate nvidia-smi <<<'[ -n "${NO_GPU:-}" ] && exit 9; [ "$1 $2" != "-i 3" ] || DRIVER=525.1; echo "NVIDIA H200, ${DRIVER:-580.1}, 143771 MiB, 9.0"'
    imitate compute-sanitizer <<<'echo "compute-sanitizer $*"; [ "$2" != "${BROKEN_TOOL:-}" ]'
    imitate nvidia-cuda-mps-control <<<'echo "mps $* $(basename "$CUDA_MPS_PIPE_DIRECTORY") $([ -n "$1" ] || cat)"'
    imitate ncu <<<'echo "ncu $*"; [ -z "${FORBIDDEN:-}" ] || { echo "==ERROR== ERR_NVGPUCTRPERM"; exit 1; }; [ -z "${TALKATIVE:-}" ] || head -c 3000000 /dev/zero | tr "\0" "x"'
    imitate python3 <<<'echo "python3 $*"; case "$*" in *broken.whl) exit 1 ;; esac'
    imitate timeout <<<'echo "$3" >>"$LIMITS"; shift 3; sleep "${SLOW:-0}"; exec "$@"'
    export CALLS=$work/calls LIMITS=$work/limits OUT=$work/out CXX=$work/bin/g++ NVCC=$work/bin/nvcc
    gpu() {  # STATUS ARGUMENTS...
      local expected=$1 status=0
      shift
      rm -rf "$OUT" "$CALLS" "$LIMITS"
      touch "$CALLS"
      env -u CUDA_ARCH -u PYTHON PATH="$work/bin:$PATH" bash "$tree/tools/gpu.sh" "$@" >"$work/log" 2>&1 || status=$?
      [ "$status" = "$expected" ] || { tail -c 4000 "$work/log"; fail "gpu.sh $*: exit $status, not $expected"; }
    }
    gpu 2 tset
    says "$work/log" "unknown step 'tset'"
    NO_GPU=1 gpu 77 bench
    says "$work/log" "bench: NOT run, no NVIDIA GPU here"
    NO_GPU=1 gpu 0 build
    says "$CALLS" "code=sm_90a"
    NO_GPU=1 gpu 0 build
    [ ! -s "$CALLS" ] || fail "compiled again although nothing has changed"
    DRIVER=570.86.15 gpu 1 bench
    says "$work/log" "the driver is 570.86.15, programs of CUDA 13 need 580 or newer"
    [ ! -e "$OUT" ] || fail "a step was begun on a driver that is too old"
    gpu 0 sanitize2 bench
    [ "$(ls "$OUT" | tr '\n' ' ')" = "bench.txt sanitize2.txt " ] || fail "left: $(ls "$OUT")"
    says "$OUT/sanitize2.txt" "compute-sanitizer --tool synccheck"
    gpu 0
    [ "$(ls "$OUT" | wc -l)" = 6 ] || fail "not six files: $(ls "$OUT")"
    [ "$(grep -c '^ncu ' "$OUT/profile.txt")" = 4 ] || fail "not four cases profiled"
    [ ! -s "$CALLS" ] || fail "compiled again although nothing has changed"
    for step in test sanitize sanitize2 bench profile peers; do  # each within nine minutes, none without a limit
      gpu 0 $step
      seconds=$(awk '{ s += $1 } END { print s }' "$LIMITS")
      [ "$seconds" -gt 0 ] && [ "$seconds" -le 540 ] || fail "$step may take $seconds s"
      [ "$(grep -c '^== ' "$OUT/$step.txt")" = "$(wc -l <"$LIMITS")" ] || fail "$step: a part without a limit"
    done
    TALKATIVE=yes gpu 1 profile
    CUDA_VISIBLE_DEVICES=3,1 gpu 1 bench  # the device that programs see
    says "$work/log" "the driver is 525.1"
    FORBIDDEN=yes gpu 0 profile
    [ "$(grep -c "NOT profiled, ncu is not permitted" "$OUT/profile.txt")" = 4 ] || fail "counters that are not permitted"
    gpu 0 once  # everything, within the time that is left
    [ "$(ls "$OUT" | wc -l)" = 6 ] || fail "once: not six files: $(ls "$OUT")"
    [ "$(cat "$OUT"/*.txt | grep -c '^== ')" = "$(wc -l <"$LIMITS")" ] || fail "once: a part without a limit"
    says "$OUT/test.txt" "mps -d tmp."
    says "$OUT/test.txt" "quit"
    [ "$(grep -c '^cuda_gpu_test --test-case=kernels' "$OUT/test.txt")" = 2 ] || fail "not two processes by MPS"
    says "$OUT/bench.txt" "cuda_sweep 0.05"
    says "$OUT/peers.txt" "gpu_peers.py --seconds 120"
    [ "$(sort -n "$LIMITS" | tail -n 1)" -le 160 ] || fail "once: a part may take $(sort -n "$LIMITS" | tail -n 1) s"
    SLOW=3 CALL_SECONDS=15 gpu 1 once
    says "$work/log" "left out, the time is up"
    [ -s "$LIMITS" ] && [ "$(sort -n "$LIMITS" | tail -n 1)" -le 15 ] || fail "once: a part may end after the call"
    [ "$(wc -c <"$OUT/profile.txt")" -le 6100000 ] || fail "profile.txt has $(wc -c <"$OUT/profile.txt") bytes"
    mkdir "$tree/.gpu-pack/peers"
    touch "$tree/.gpu-pack/peers/broken.whl" "$tree/.gpu-pack/peers/good.whl"
    gpu 1 peers
    says "$work/log" "  wheels: exit 1"
    says "$OUT/peers.txt" "good.whl"
    says "$OUT/peers.txt" "gpu_peers.py --seconds 400"
    BROKEN="cuda_gpu_test" BROKEN_TOOL=memcheck gpu 1 test sanitize bench
    says "$work/log" "FAILED, 3:"
    says "$work/log" "  CUDA tests: exit 3"
    says "$work/log" "  memcheck: exit 1"
    says "$work/log" "  two processes by MPS: exit 3"
    says "$OUT/test.txt" "serve generate --device cuda"
    says "$OUT/sanitize.txt" "compute-sanitizer --tool racecheck"
    says "$OUT/bench.txt" "cuda_sweep 0.3"
    echo "// changed" >>"$tree/tests/main.cpp"
    UNBUILDABLE=cuda_sweep gpu 1 test bench
    says "$work/log" "  cuda_sweep: does not compile"
    says "$OUT/test.txt" "cuda_gpu_test"
    rm "$work/bin/python3"
    imitate python3 <<<'exit 1'
    gpu 1 peers
    says "$work/log" "peers: python3 has no PyTorch"
    if python3 -c "import numpy" 2>/dev/null; then
      (cd "$root" && python3 bench/peers/gpu_peers.py --self-check >"$work/log") ||
        { cat "$work/log"; fail "gpu_peers.py"; }
    else
      echo "numpy not found: the peers' cases were NOT checked (gpu_peers.py --self-check)"
    fi
    ;;
  *)
    echo "unknown check $check"
    exit 2
    ;;
esac
