#!/usr/bin/env bash
# run.sh FOLDER: installs the Python package into FOLDER, with fewer kernels than users get, and runs its tests.
# Needs a Python with torch and transformers: PYTHON, or build/peers/venv (which ./dev peers makes), or python3.
# Exit 77: there is none.
set -euo pipefail
folder=$(realpath -m "$1")
package=$(cd "$(dirname "$0")/.." && pwd)
root=$(cd "$package/../.." && pwd)

skip() { echo "SKIPPED: tests of the Python package: $*"; exit 77; }
python=""
for candidate in ${PYTHON:-} "$root/build/peers/venv/bin/python" python3; do
  if "$candidate" -c 'import torch, transformers, sys; sys.exit(transformers.__version__ < "5")' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || skip "no Python with torch and transformers 5 (./dev peers installs them; PYTHON names one)"

mkdir -p "$folder"
pip() { "$python" -m pip --disable-pip-version-check -q "$@"; }
if [ ! -e "$folder/tools/complete" ]; then
  rm -rf "$folder/tools"
  pip install --target "$folder/tools" 'nanobind>=3.1,<4' 'scikit-build-core>=0.10' >"$folder/tools.log" 2>&1 ||
    skip "nanobind and scikit-build-core could not be installed: $(tail -1 "$folder/tools.log")"
  touch "$folder/tools/complete"
fi

# lm-evaluation-harness comes into an environment of its own, which sees the other one's packages.
lm_eval=$folder/lm_eval
if [ ! -e "$lm_eval/complete" ]; then
  rm -rf "$lm_eval"
  { "$python" -m venv "$lm_eval" &&
    "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
      >"$("$lm_eval/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth" &&
    "$lm_eval/bin/python" -m pip --disable-pip-version-check -q install 'lm_eval>=0.4.13,<0.5' accelerate &&
    touch "$lm_eval/complete"; } >"$folder/lm_eval.log" 2>&1 ||
    echo "skipped: test_lm_eval: lm_eval could not be installed: $(tail -1 "$folder/lm_eval.log")"
fi

rm -rf "$folder/site"
PYTHONPATH=$folder/tools pip install --no-deps --no-build-isolation --target "$folder/site" "$package" \
  -C build-dir="$folder/build" -C cmake.define.CHUNKATTN_PYTHON_HEAD_DIMS="64" \
  -C cmake.define.CHUNKATTN_PYTHON_KV_TYPES="float;bfloat16"

cd "$package/tests"
export PYTHONPATH=$folder/site PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
export CHUNKATTN_MODELS=${CHUNKATTN_MODELS:-$root/build/models}
"$python" -m unittest test_attention test_explain test_transformers test_windows test_hybrids test_scoring 2>&1 | grep -v '^\[transformers\]'
if [ -e "$lm_eval/complete" ]; then
  "$lm_eval/bin/python" -m unittest test_lm_eval 2>&1 | grep -v '^\[transformers\]'
fi
