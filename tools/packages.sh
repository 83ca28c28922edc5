# What must be installed, for scripts to source: `need ITEM...` installs what is missing with apt-get
# where that is possible, and else says what it is. Needs bash and nothing else.

say() { printf '\n==> %s\n' "$*"; }
fail() { printf '\nFAILED: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# jobs_for PROCESSORS QUOTA: how many compilers at once, where a container's quota ("150000 100000", "max 100000",
# "-1 100000" or nothing), of which nproc knows nothing, may allow fewer.
jobs_for() {
  local most=$1
  if [[ $2 =~ ^([0-9]+)\ ([1-9][0-9]*)$ ]]; then
    most=$((BASH_REMATCH[1] / BASH_REMATCH[2]))
    most=$((most < 1 ? 1 : most < $1 ? most : $1))
  fi
  echo "$most"
}

# cpu_quota [FOLDER]: that quota, as cgroups of version 2 or 1 have it.
cpu_quota() {
  local at=${1:-/sys/fs/cgroup}
  cat "$at/cpu.max" 2>/dev/null || echo $(cat "$at"/cpu/cpu.cfs_{quota,period}_us 2>/dev/null)
}

# Installs Debian packages, or says exactly what to install. Called only with what is missing.
install_packages() {
  local as_root=""
  if have apt-get; then
    if [ "$(id -u)" != 0 ]; then
      if have sudo && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
        as_root=sudo
      else
        fail "this needs packages that only root can install:  sudo apt-get install -y $*"
      fi
    fi
    say "installing with apt-get: $*"
    local log
    log=$(mktemp)
    $as_root apt-get update -qq >"$log" 2>&1 ||
      echo "apt-get update failed; trying with the lists at hand"
    if ! $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o Dpkg::Use-Pty=0 \
      --no-install-recommends "$@" >>"$log" 2>&1; then
      cat "$log"
      rm -f "$log"
      fail "apt-get could not install: $*"
    fi
    rm -f "$log"
  else
    fail "please install what these Debian packages contain, then run this again: $*"
  fi
}

has_header() { echo "#include <$1>" | "${CXX:-c++}" -x c++ -E - >/dev/null 2>&1; }

# clang_format: the name that clang-format 19 has here. Other versions differ in details.
clang_format() {
  local name
  for name in clang-format-19 clang-format; do
    if have "$name" && "$name" --version | grep -q 'version 19[.]'; then
      echo "$name"
      return
    fi
  done
  return 1
}

# need ITEM...: each an item below. Installs the missing ones in one go.
need() {
  local item missing=()
  for item in "$@"; do
    case $item in
      compiler) have "${CXX:-c++}" || missing+=(g++ libc6-dev) ;;
      cmake) have cmake || missing+=(cmake) ;;
      make) have ninja || have make || missing+=(ninja-build) ;;
      doctest) has_header doctest/doctest.h || missing+=(doctest-dev) ;;
      benchmark) has_header benchmark/benchmark.h || missing+=(libbenchmark-dev) ;;
      fmt) has_header fmt/core.h || missing+=(libfmt-dev) ;;
      json) has_header nlohmann/json.hpp || missing+=(nlohmann-json3-dev) ;;
      cli11) has_header CLI/CLI.hpp || missing+=(libcli11-dev) ;;
      xxhash) has_header xxhash.h || missing+=(libxxhash-dev) ;;
      utf8proc) has_header utf8proc.h || missing+=(libutf8proc-dev) ;;
      httplib) has_header httplib.h || missing+=(libcpp-httplib-dev) ;;
      hiredis) has_header hiredis/hiredis.h || missing+=(libhiredis-dev) ;;
      redis) have redis-server || missing+=(redis-server) ;;
      zmq) has_header zmq.hpp || missing+=(cppzmq-dev) ;;
      onednn) has_header oneapi/dnnl/dnnl.h || missing+=(libdnnl-dev) ;;
      mpi) have mpirun && have mpicxx || missing+=(libopenmpi-dev openmpi-bin) ;;
      aarch64)
        have aarch64-linux-gnu-g++ || missing+=(g++-aarch64-linux-gnu)
        have qemu-aarch64 || missing+=(qemu-user)
        ;;
      windows)
        have x86_64-w64-mingw32-g++-posix || missing+=(g++-mingw-w64-x86-64-posix)
        have wine || missing+=(wine wine64)
        ;;
      clang) have clang++-19 || missing+=(clang-19) ;;
      libcxx) echo '#include <version>' | clang++-19 -stdlib=libc++ -x c++ -E - >/dev/null 2>&1 ||
        missing+=(libc++-19-dev libc++abi-19-dev) ;;
      clang-format) clang_format >/dev/null || missing+=(clang-format-19) ;;
      doxygen) have doxygen || missing+=(doxygen) ;;
      rust) have rustc || missing+=(rustc) ;;
      pkg-config) have pkg-config || missing+=(pkg-config) ;;
      python) have python3 && python3 -c 'import venv, ensurepip' 2>/dev/null ||
        missing+=(python3 python3-venv) ;;
      *) fail "need: unknown item '$item'" ;;
    esac
  done
  [ ${#missing[@]} -eq 0 ] || install_packages "${missing[@]}"
  if have ninja; then export CMAKE_GENERATOR=${CMAKE_GENERATOR:-Ninja}; fi  # CMake looks for make alone
  if ! echo '#include <bit>
#include <concepts>
#include <span>
template <std::integral T> constexpr T f(T x) { return std::bit_cast<T>(x); }
static_assert(f(1) == 1);' | "${CXX:-c++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
    fail "${CXX:-c++} does not compile C++20: install g++ 12 or clang 14 (or newer) and set CXX to it"
  fi
}

# want ITEM...: the same for what can be done without: says so where it cannot be installed.
want() { (need "$@") || echo "going on without: $*"; }
