# For scripts to source: a wine of their own until they end. Its server is started first: else it is started by a test
# and keeps that test's output open, for whose end ctest waits.
export WINEDEBUG=-all
WINEPREFIX=$(mktemp -d)
export WINEPREFIX
wineserver=$(command -v wineserver || ls /usr/lib/wine/wineserver*[0-9] | head -1)
trap '"$wineserver" -k || true; rm -rf "$WINEPREFIX"' EXIT
"$wineserver" -p </dev/null >/dev/null 2>&1
wine wineboot -i </dev/null >/dev/null 2>&1
