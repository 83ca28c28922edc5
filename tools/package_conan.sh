#!/usr/bin/env bash
# package_conan.sh WORK_DIR: `conan create` of this checkout and of the recipe for a registry, with
# the profile that Conan detects. Without Conan 2 it is installed into an environment of its own;
# where that cannot be done this leaves with 77.
set -euo pipefail
work=$1
cd "$(dirname "$0")/.."
mkdir -p "$work"
work=$(cd "$work" && pwd)
recipe=cmake/packaging/conan/chunkattn
version=$(sed -n 's/^#define CHUNKATTN_VERSION_[MP][A-Z]* \([0-9]*\)$/\1/p' include/chunkattn/version.hpp | paste -sd.)

fail() { echo "FAILED: $*"; exit 1; }

if [[ $(conan --version 2>/dev/null) == *"version 2"* ]]; then
  conan=conan
else
  conan=$work/venv/bin/conan
  if [ ! -x "$conan" ] && ! { python3 -m venv "$work/venv" &&
    "$work/venv/bin/pip" install --quiet 'conan>=2,<3'; }; then
    echo "SKIPPED: package conan needs Conan 2, which is not installed, and pip could not install it"
    exit 77
  fi
fi

export CONAN_HOME=$work/home
rm -rf "$CONAN_HOME" "$work/alone" "$work/consumer"
"$conan" --version
"$conan" profile detect
options=(--no-remote -c tools.cmake.cmake_layout:test_folder="$work/test")
[ -z "${CMAKE_GENERATOR:-}" ] || options+=(-c tools.cmake.cmaketoolchain:generator="$CMAKE_GENERATOR")
create() { "$conan" create "$@" "${options[@]}"; }

echo "--- conan create . with the profile as detected"
create .

echo "--- a program that says nothing of its C++ standard, with that profile"
"$conan" install --requires="chunkattn/$version" --no-remote -g CMakeDeps -g CMakeToolchain \
  --output-folder="$work/consumer" >"$work/consumer.log" 2>&1 || { cat "$work/consumer.log"; exit 1; }
cmake -S tests/project/consumer/find_package -B "$work/consumer/build" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_TOOLCHAIN_FILE="$work/consumer/conan_toolchain.cmake"
cmake --build "$work/consumer/build"
"$work/consumer/build/consumer"

echo "--- what cannot compile it is refused in words"
refused() {  # refused TEXT [settings...]
  local text=$1
  shift
  if create . "$@" >"$work/refused.log" 2>&1; then fail "accepted: $*"; fi
  grep -m 1 -F "$text" "$work/refused.log" || { cat "$work/refused.log"; fail "not refused in words: $*"; }
}
refused "chunkattn needs gcc 12 or clang 14 or newer; the profile has gcc 11" \
  -s compiler=gcc -s compiler.version=11 -s compiler.libcxx=libstdc++11
refused "chunkattn needs gcc 12 or clang 14 or newer; the profile has apple-clang 15" \
  -s compiler=apple-clang -s compiler.version=15 -s compiler.libcxx=libc++
for setting in os=Macos arch=x86; do refused "$setting is not supported" -s:h "$setting"; done
refused "arch=armv8 is not supported" -s:h os=Windows -s:h arch=armv8
refused "chunkattn needs gcc 12 or clang 14 or newer; the profile has msvc 193" -s:h os=Windows \
  -s:h compiler=msvc -s:h compiler.version=193 -s:h compiler.runtime=dynamic
create . -s:h os=Windows -s:h compiler.threads=posix -tf= >"$work/windows.log" 2>&1 || { cat "$work/windows.log"; exit 1; }
echo "packaged for os=Windows with g++"

echo "--- one package serves every setting"
create . -s build_type=Debug -s compiler.cppstd=20 >"$work/debug.log" 2>&1 || { cat "$work/debug.log"; exit 1; }
ids=$("$conan" list "chunkattn/$version:*" --format=compact | grep -oE '#[0-9a-f]+:[0-9a-f]{40}' | sed 's/.*://' | sort -u | wc -l)
[ "$ids" -eq 1 ] || fail "$ids package ids, a header-only package has one"

# The registry's recipe downloads a release: here an archive of this checkout lies in its place.
echo "--- the registry's recipe by itself"
cp -R "$recipe" "$work/alone"
rm -rf "$work/alone/all/test_package/build"
grep -qF "\"$version\":" "$work/alone/config.yml" || fail "config.yml does not name $version"
"$conan" export "$work/alone/all" --version "$version"
archive=$work/alone/chunkattn-$version.tar.gz
tools/source_archive.sh "$archive"
sed -i -e "s|url: .*|url: \"file://$archive\"|" -e "s|sha256: .*|sha256: \"$(sha256sum "$archive" | cut -d' ' -f1)\"|" \
  "$work/alone/all/conandata.yml"
create "$work/alone/all" --version "$version"
echo "conan create passed for the checkout and for the recipe of a registry"
