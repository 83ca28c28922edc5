#!/usr/bin/env bash
# package_vcpkg.sh WORK_DIR: installs the vcpkg port and builds a program against it. With VCPKG_ROOT
# set (or vcpkg on the PATH) through vcpkg itself; otherwise the portfile is run by a script that
# offers the same functions (tools/vcpkg_stand_in.cmake), and that is said.
set -eu
work=$1
cd "$(dirname "$0")/.."
root=$PWD
rm -rf "$work"
mkdir -p "$work"
work=$(cd "$work" && pwd)
port=$root/cmake/packaging/vcpkg

vcpkg=$(command -v vcpkg || echo "${VCPKG_ROOT:-}/vcpkg")
if [ -x "$vcpkg" ]; then
  "$vcpkg" install chunkattn --overlay-ports="$port" --x-install-root="$work/installed"
  installed=$(dirname "$(find "$work/installed" -path '*/include/chunkattn' -type d | head -n 1)")/..
else
  echo "no vcpkg at hand: the portfile's steps are run by tools/vcpkg_stand_in.cmake"
  installed=$work/installed
  cmake -DPORT_DIR="$port/chunkattn" -DCURRENT_PACKAGES_DIR="$installed" -DWORK_DIR="$work" \
    -P tools/vcpkg_stand_in.cmake
fi
for file in share/chunkattn/copyright share/chunkattn/usage share/chunkattn/chunkattn-config.cmake; do
  [ -f "$installed/$file" ] || { echo "FAILED: the port does not install $file"; exit 1; }
done
[ ! -e "$installed/lib" ] && [ ! -e "$installed/debug" ] || { echo "FAILED: lib or debug is left"; exit 1; }

cmake -S tests/consumer/find_package -B "$work/consumer" -DCMAKE_PREFIX_PATH="$installed"
cmake --build "$work/consumer"
"$work/consumer/consumer"
