#!/usr/bin/env bash
# release.sh: tags this commit as the version of include/chunkattn/version.hpp; the tag's message is
# that version's section of CHANGELOG.md. Refuses what would be a wrong release. Pushes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "FAILED: $*"; exit 1; }
[ $# -eq 0 ] || fail "release takes no options, not '$*'"

version=$(sed -n 's/^#define CHUNKATTN_VERSION_[MP][A-Z]* \([0-9]*\)$/\1/p' include/chunkattn/version.hpp | paste -sd.)
newest=$(awk '/^## / { print $2; exit }' CHANGELOG.md)
[ "$newest" = "$version" ] ||
  fail "CHANGELOG.md begins with version ${newest:-none}, include/chunkattn/version.hpp says $version"
notes=$(awk '/^## / { if (inside) exit; inside = 1; next } inside' CHANGELOG.md)
[ -n "${notes//[[:space:]]/}" ] || fail "CHANGELOG.md says nothing of version $version"
tools/check_version.sh
[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed: git status"
! git rev-parse -q --verify "refs/tags/v$version" >/dev/null || fail "the tag v$version exists already"

git tag -a "v$version" --cleanup=whitespace -F - <<<"chunkattn $version

$notes"
echo "tagged $(git rev-parse --short HEAD) as v$version; publish it with: git push origin v$version"
