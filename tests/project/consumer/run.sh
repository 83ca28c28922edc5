#!/usr/bin/env bash
# run.sh MODE WORK_DIR: builds and runs a small program against the library the way MODE names.
# Exit 0: it ran. 77: a tool is missing, said aloud. Anything else: failed.
set -euo pipefail
mode=$1
work=$2
root=$(cd "$(dirname "$0")/../../.." && pwd)
here=$root/tests/project/consumer
cxx=${CXX:-c++}
cmake=${CMAKE:-cmake}
[ -z "${GENERATOR:-}" ] || export CMAKE_GENERATOR=$GENERATOR
# Warnings from our headers fail a consumer that uses -I, not -isystem.
strict="-Wall -Wextra -Werror"

rm -rf "$work"
mkdir -p "$work"
work=$(cd "$work" && pwd)  # CMake takes a relative prefix as one of the consumer's folder

configure() {  # configure SOURCE_FOLDER [options...]
  local source=$1
  shift
  "$cmake" -S "$here/$source" -B "$work/build" -DCMAKE_CXX_COMPILER="$cxx" \
    -DCMAKE_NO_SYSTEM_FROM_IMPORTED=ON -DCMAKE_CXX_FLAGS="$strict" "$@"
}

build_and_run() {
  "$cmake" --build "$work/build"
  "$work/build/consumer"
}

stage() {  # installs as README says, without a compiler, then moves it: nothing may point at where it was
  "$cmake" -S "$root" -B "$work/library" -DCMAKE_CXX_COMPILER=/none -DCMAKE_C_COMPILER=/none \
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON --no-warn-unused-cli -Werror=dev >"$work/library.log"
  if [ -e "$work/library/compile_commands.json" ]; then
    echo "FAILED: without options $(grep -c '"file":' "$work/library/compile_commands.json") objects would be compiled"
    exit 1
  fi
  "$cmake" --install "$work/library" --prefix "$work/first" >>"$work/library.log"
  mv "$work/first" "$work/stage"
  if grep -rlF "$root" "$work/stage"; then
    echo "FAILED: the installed files above name the source tree"
    exit 1
  fi
}

need_nvcc() {
  nvcc=${NVCC:-}
  [ -x "$nvcc" ] || nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  if [ ! -x "$nvcc" ]; then
    echo "SKIPPED: consumer $mode needs nvcc"
    exit 77
  fi
}

case $mode in
  find_package)
    stage
    configure find_package -DCMAKE_PREFIX_PATH="$work/stage" -DWANTED_VERSION="$CHUNKATTN_VERSION"
    build_and_run
    ;;
  wrong_version)
    stage
    major=${CHUNKATTN_VERSION%%.*}
    rest=${CHUNKATTN_VERSION#*.}
    minor=${rest%%.*}
    for wrong in "$((major + 1)).0" "$major.$((minor - 1))" "$major.$((minor + 1))" "$major.$minor.999"; do
      if configure find_package -DCMAKE_PREFIX_PATH="$work/stage" -DWANTED_VERSION="$wrong" \
        >"$work/log" 2>&1; then
        echo "FAILED: version $wrong was accepted, $CHUNKATTN_VERSION is installed"
        exit 1
      fi
      grep -q "version: $CHUNKATTN_VERSION" "$work/log" || { cat "$work/log"; exit 1; }
      rm -rf "$work/build"
      echo "refused as it should be: $wrong"
    done
    if configure find_package -DCMAKE_PREFIX_PATH="$work/stage" -DCOMPONENTS=rocm \
      -DCMAKE_CUDA_COMPILER_WORKS=1 -DCMAKE_CUDA_COMPILER=/bin/true >"$work/log" 2>&1; then
      echo "FAILED: an unknown component was accepted"
      exit 1
    fi
    ;;
  layouts) source "$here/layouts.sh" ;;
  add_subdirectory)
    configure "$mode" -DCHUNKATTN_ROOT="$root"
    build_and_run
    ;;
  kernels)  # compiled once, by the installed package's function: the same bits, and clear errors of the linker
    stage
    configure kernels -DCMAKE_PREFIX_PATH="$work/stage"
    "$cmake" --build "$work/build"
    "$work/build/alone" >"$work/alone"
    "$work/build/consumer" | tee "$work/compiled"
    cmp "$work/alone" "$work/compiled" || { echo "FAILED: compiled once, kernels give other bits"; exit 1; }
    refused() {  # refused WHAT TEXTS -- OPTIONS: a unit with these does not link to the library
      local what=$1 texts=() text
      shift
      while [ "$1" != -- ]; do texts+=("$1") && shift; done
      # shellcheck disable=SC2086
      "$cxx" -std=c++20 -O0 $strict -DCHUNKATTN_EXTERN_KERNELS -DPLAIN_ALONE -I "$work/stage/include" "${@:2}" \
        "$here/kernels/main.cpp" "$work/build/libkernels.a" -o "$work/refused" -pthread 2>"$work/log" &&
        { echo "FAILED: $what was linked"; exit 1; }
      for text in "${texts[@]}"; do
        grep -q "undefined .*$text" "$work/log" || { cat "$work/log"; echo "FAILED: no word of $text"; exit 1; }
      done
      echo "refused as it should be: $what"
    }
    refused "a head size that is not compiled" "run_kernels<40, 40, .*half, float" -- -DHEAD_DIM=40
    refused "an element type that is not compiled" "write_kernels<64, 32, .*bfloat16, float" -- -DELEMENT=bfloat16
    refused "a unit with other options" "run_kernels<64, 32" -- -DCHUNKATTN_ISA=portable
    ;;
  readme)  # README's first program by the CMake beside it: a change of main.cpp compiles that alone
    "$root/tools/quick_start.sh" "$root/README.md" first >"$work/main.cpp"
    awk '/^```cmake$/ && !found { inside = found = 1; next } /^```$/ { inside = 0 } inside' "$root/README.md" >"$work/CMakeLists.txt"
    ln -s "$root" "$work/chunkattn"
    # As README says, but without optimisation, which takes longer.
    "$cmake" -S "$work" -B "$work/build" -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_BUILD_TYPE=Debug
    "$cmake" --build "$work/build"
    "$work/build/main" | tee "$work/printed"
    grep -qxFf "$work/printed" "$root/README.md" || { echo "FAILED: that is not what README shows"; exit 1; }
    echo "// changed" >>"$work/main.cpp"
    "$cmake" --build "$work/build" >"$work/log"
    grep -q 'main.cpp' "$work/log" || { cat "$work/log"; echo "FAILED: main.cpp is not compiled again"; exit 1; }
    ! grep -n 'half_float' "$work/log" || { echo "FAILED: kernels are compiled again"; exit 1; }
    ;;
  fetch_content)
    sed -n '/^include(FetchContent)$/,/^```$/{/^```$/!p}' "$root/README.md" >"$work/readme.cmake"
    options=(-DCHUNKATTN_ROOT="$root")
    if git -C "$root" rev-parse 2>/dev/null; then  # a clone stands for the address that README names
      git clone -q "$root" "$work/repository"
      git -C "$work/repository" branch -q -f main 2>/dev/null || true  # or it is checked out
      address=$(sed -n 's/.*GIT_REPOSITORY //p' "$work/readme.cmake")
      export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=url.$work/repository.insteadOf GIT_CONFIG_VALUE_0=$address
      options=()
    else
      echo "not a clone: README's FetchContent lines were tried without fetching"
    fi
    configure "$mode" "${options[@]}" -DREADME_LINES="$work/readme.cmake"
    build_and_run
    ;;
  serve)  # configured by itself, as its CMakeLists.txt says it can be
    "$cmake" -S "$root/examples/serve" -B "$work/build" -DCMAKE_CXX_COMPILER="$cxx"
    ;;
  pkg_config)
    if ! command -v pkg-config >/dev/null; then
      echo "SKIPPED: consumer pkg_config needs pkg-config"
      exit 77
    fi
    stage
    export PKG_CONFIG_PATH=$work/stage/share/pkgconfig
    [ "$(pkg-config --modversion chunkattn)" = "$CHUNKATTN_VERSION" ]
    # shellcheck disable=SC2046,SC2086
    "$cxx" -std=c++20 $strict "$here/main.cpp" -o "$work/consumer" \
      $(pkg-config --cflags --libs chunkattn)
    "$work/consumer"
    ;;
  plain)
    # shellcheck disable=SC2086
    "$cxx" -std=c++20 $strict -I "$root/include" "$here/main.cpp" -o "$work/consumer" -pthread
    "$work/consumer"
    ;;
  cuda)
    need_nvcc
    stage
    CUDACXX=$nvcc configure find_package -DCMAKE_PREFIX_PATH="$work/stage" -DCOMPONENTS=cuda
    build_and_run
    ;;
  nvcc)
    need_nvcc
    "$nvcc" -std=c++20 -arch=sm_80 -I "$root/include" "$here/device.cu" \
      -o "$work/consumer"
    "$work/consumer"
    ;;
  *)
    echo "unknown mode $mode"
    exit 2
    ;;
esac
