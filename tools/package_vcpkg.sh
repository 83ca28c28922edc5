#!/usr/bin/env bash
# package_vcpkg.sh WORK_DIR: installs the port with vcpkg, from this checkout and as a registry has
# it, and builds a program against each. vcpkg is looked for in VCPKG_ROOT, then on the PATH; without
# one this leaves with 77. The user's vcpkg is left as it is, but for what it caches.
set -euo pipefail
work=$1
cd "$(dirname "$0")/.."
root=$PWD
ports=$root/cmake/packaging/vcpkg
rm -rf "$work"
mkdir -p "$work"
work=$(cd "$work" && pwd)
version=$(sed -n 's/^#define CHUNKATTN_VERSION_[MP][A-Z]* \([0-9]*\)$/\1/p' include/chunkattn/version.hpp | paste -sd.)

fail() { echo "FAILED: $*"; exit 1; }

if [ -n "${VCPKG_ROOT:-}" ] && [ -x "$VCPKG_ROOT/vcpkg" ]; then
  vcpkg=$VCPKG_ROOT/vcpkg
elif ! vcpkg=$(command -v vcpkg); then
  echo "SKIPPED: package vcpkg needs vcpkg: set VCPKG_ROOT or put it on the PATH"
  exit 77
fi
"$vcpkg" version | sed -n 1p

vcpkg_install() {  # vcpkg_install NAME PACKAGE OVERLAY [options...]
  local name=$1 package=$2 overlay=$3
  shift 3
  "$vcpkg" install "$package" --classic --editable --overlay-ports="$overlay" --binarysource=clear \
    --x-install-root="$work/$name" --x-buildtrees-root="$work/buildtrees" \
    --x-packages-root="$work/packages" "$@" 2>&1 | tee "$work/$name.log"
  if grep -F 'warning:' "$work/$name.log"; then fail "$name: vcpkg warns"; fi
}

use() {  # use NAME: what is installed, and a program built against it
  local name=$1 installed file
  installed=$(find "$work/$name" -path '*/include/chunkattn' -type d -print -quit)
  installed=${installed%/include/chunkattn}
  for file in share/chunkattn/{copyright,usage,chunkattn-config.cmake} lib/pkgconfig/chunkattn.pc; do
    [ -f "$installed/$file" ] || fail "$name: the port does not install $file"
  done
  [ ! -e "$installed/debug" ] || fail "$name: a header-only port installs debug/"
  ! grep -rlF "$root" "$installed/share/chunkattn"/*.cmake "$installed/lib" || fail "$name: a path of the checkout"
  cmake -S tests/project/consumer/find_package -B "$work/$name-consumer" -DCMAKE_PREFIX_PATH="$installed" \
    -DWANTED_VERSION="$version"
  cmake --build "$work/$name-consumer"
  "$work/$name-consumer/consumer"
}

echo "--- from this checkout, as an overlay port"
vcpkg_install overlay chunkattn "$ports/overlay"
use overlay
"$vcpkg" install 'chunkattn[cuda]' --classic --dry-run --overlay-ports="$ports/overlay" \
  --x-install-root="$work/dry" | grep -F 'chunkattn[core,cuda]' || fail "there is no feature cuda"

# The port of a registry downloads a release: here an archive of this checkout lies in its place.
echo "--- the registry's port by itself"
mkdir -p "$work/registry" "$work/downloads"
cp -R "$ports/ports/chunkattn" "$work/registry/"
repository=$(sed -n 's/^ *REPO //p' "$work/registry/chunkattn/portfile.cmake")
archive=$work/downloads/${repository/\//-}-v$version.tar.gz
tools/source_archive.sh "$archive"
sed -i "s/SHA512 .*/SHA512 $(sha512sum "$archive" | cut -d' ' -f1)/" "$work/registry/chunkattn/portfile.cmake"
tools=$(dirname "$(readlink -f "$vcpkg")")/downloads/tools  # what it has downloaded for itself before
[ ! -d "$tools" ] || ln -s "$tools" "$work/downloads/tools"
vcpkg_install registry chunkattn "$work/registry" --downloads-root="$work/downloads"
use registry
cp cmake/packaging/vcpkg/ports/chunkattn/vcpkg.json "$work/formatted.json"
"$vcpkg" format-manifest "$work/formatted.json" >/dev/null
cmp "$work/formatted.json" cmake/packaging/vcpkg/ports/chunkattn/vcpkg.json || fail "vcpkg format-manifest would change vcpkg.json"
echo "vcpkg installed the port from the checkout and as a registry's"
