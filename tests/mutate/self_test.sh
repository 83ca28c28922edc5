#!/usr/bin/env bash
# self_test.sh FOLDER: self_test.py, where there is a python3.
if ! command -v python3 >/dev/null 2>&1; then
  echo "SKIPPED: python3 is missing"
  exit 77
fi
exec python3 "$(dirname "$0")/self_test.py" "$@"
