#!/usr/bin/env bash
# package_conan.sh WORK_DIR: `conan create` with its test package, in an environment of its own.
# Where Conan cannot be installed it fails, or with CHUNKATTN_OFFLINE=skip leaves with 77.
set -eu
work=$1
cd "$(dirname "$0")/.."
mkdir -p "$work"
work=$(cd "$work" && pwd)

if command -v conan >/dev/null && conan --version | grep -q 'version 2'; then
  conan=conan
else
  conan=$work/venv/bin/conan
  if [ ! -x "$conan" ] && ! { python3 -m venv "$work/venv" &&
    "$work/venv/bin/pip" install --quiet 'conan>=2,<3'; }; then
    echo "SKIPPED: Conan 2 is not installed, and pip could not install it"
    [ "${CHUNKATTN_OFFLINE:-fail}" = skip ] && exit 77
    exit 1
  fi
fi

export CONAN_HOME=$work/home
rm -rf "$CONAN_HOME"
"$conan" --version
"$conan" profile detect --force >/dev/null
"$conan" create . -s compiler.cppstd=20 --no-remote -c tools.cmake.cmake_layout:test_folder="$work/test"

# An older standard is refused in words.
if "$conan" create . -s compiler.cppstd=17 --no-remote -c tools.cmake.cmake_layout:test_folder="$work/test" >"$work/cpp17.log" 2>&1; then
  echo "FAILED: C++17 was accepted"
  exit 1
fi
grep -m 1 'cppstd (17)' "$work/cpp17.log" || { cat "$work/cpp17.log"; exit 1; }

# One package serves every setting.
"$conan" create . -s compiler.cppstd=20 -s build_type=Debug --no-remote -c tools.cmake.cmake_layout:test_folder="$work/test" >"$work/debug.log" 2>&1
ids=$("$conan" list 'chunkattn/*:*' --format=compact | grep -oE '#[0-9a-f]+:[0-9a-f]{40}' | sed 's/.*://' | sort -u | wc -l)
[ "$ids" -eq 1 ] || { echo "FAILED: $ids package ids, a header-only package has one"; exit 1; }
echo "conan create passed with its test package"
