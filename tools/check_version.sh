#!/usr/bin/env bash
# Whatever must repeat the version agrees with include/chunkattn/version.hpp, and whatever repeats the
# repository's address with the vcpkg port.
set -eu
cd "$(dirname "$0")/.."
part() { sed -n "s/^#define CHUNKATTN_VERSION_$1 \([0-9]*\)$/\1/p" include/chunkattn/version.hpp; }
version="$(part MAJOR).$(part MINOR).$(part PATCH)"
status=0
expect() {  # expect FILE PATTERN
  grep -qE "$2" "$1" || { echo "FAILED: $1 does not name version $version"; status=1; }
}
packaging=cmake/packaging
expect $packaging/vcpkg/ports/chunkattn/vcpkg.json "\"version-semver\": \"$version\""
expect $packaging/conan/chunkattn/config.yml "^  \"$version\":"
expect $packaging/conan/chunkattn/all/conandata.yml "/v$version\.tar\.gz\""
expect CHANGELOG.md "^## $version( \(|$)"
for abi in v$(part MAJOR)_$(part MINOR) v$(part MAJOR)_$(part MINOR)_no_exceptions; do
  expect include/chunkattn/detail/support/config.hpp "CHUNKATTN_ABI $abi\$"
done
expect include/chunkattn/version.hpp "^/// .* $version is $(($(part MAJOR) * 10000 + $(part MINOR) * 100 + $(part PATCH)))\.$"
expect docs/architecture.md "in \`chunkattn::v$(part MAJOR)_$(part MINOR)\`, or \`v$(part MAJOR)_$(part MINOR)_no_exceptions\`"
expect README.md "requires\(\"chunkattn/$version\"\)"
expect CITATION.cff "^version: $version$"
repository=$(sed -n 's/^ *REPO //p' $packaging/vcpkg/ports/chunkattn/portfile.cmake)
address=$(grep -rhoE 'github\.com/[A-Za-z0-9_-]+/chunkattn' README.md CITATION.cff .github cmake tools | sort -u)
if [ "$address" != "github.com/$repository" ]; then
  echo "FAILED: the repository is named github.com/$repository and also:" $address
  status=1
fi
[ $status -eq 0 ] && echo "version $version everywhere"
exit $status
