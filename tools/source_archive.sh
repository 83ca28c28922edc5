#!/usr/bin/env bash
# source_archive.sh FILE.tar.gz: this checkout as the archive of a release, for trying recipes that
# download one. Unlike the archive of a tag it has what is not committed yet.
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^#define CHUNKATTN_VERSION_[MP][A-Z]* \([0-9]*\)$/\1/p' include/chunkattn/version.hpp | paste -sd.)
tar -czf "$1" --transform "s,^,chunkattn-$version/," CMakeLists.txt LICENSE README.md cmake include
