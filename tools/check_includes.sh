#!/usr/bin/env bash
# Includes go down the list in tools/header_order.txt and never up: a header may include only headers
# that stand before it there. The CPU and the CUDA backend do not know each other. A header that is
# not on the list fails, so that its place is decided on purpose.
set -eu
cd "$(dirname "$0")/.."
status=0
bad() { echo "FAILED: $*"; status=1; }

declare -A rank=()
n=0
while read -r header _; do
  case $header in '' | '#'*) continue ;; esac
  rank[$header]=$((n += 1))
  [ -f "include/chunkattn/$header" ] || bad "tools/header_order.txt names $header, which does not exist"
done <tools/header_order.txt

edges=0
while read -r path; do
  header=${path#include/chunkattn/}
  [ -n "${rank[$header]:-}" ] || { bad "$header is not in tools/header_order.txt"; continue; }
  while read -r name; do
    target=$(dirname "$header")/$name
    [ -f "include/chunkattn/$target" ] || target=${name#chunkattn/}
    target=$(realpath -m --relative-to=include/chunkattn "include/chunkattn/$target")
    edges=$((edges + 1))
    if [ -z "${rank[$target]:-}" ]; then
      bad "$header includes $name, which is not in tools/header_order.txt"
    elif [ "${rank[$target]}" -ge "${rank[$header]}" ]; then
      bad "$header includes $target, which stands after it in tools/header_order.txt"
    fi
    case $header:$target in
      cpu/*:cuda/* | cuda/*:cpu/*) bad "$header includes $target of the other backend" ;;
    esac
    case $header:$target in
      chunkattn.hpp:*.cuh) ;;
      *.hpp:*.cuh) bad "$header includes $target: a .hpp must compile without nvcc" ;;
    esac
  done < <(sed -nE 's/^ *#include "([^"]+)".*/\1/p' "$path")
done < <(find include/chunkattn -name '*.hpp' -o -name '*.cuh' | sort)

# Nothing public includes the standard streams, fmt or CUB's umbrella; no unnamed namespaces.
if grep -rnE '^ *#include <(iostream|ostream|istream|sstream|fstream|iomanip|print|format|regex|fmt/.*|cub/cub.cuh)>' include; then
  bad "the includes above are too heavy for a public header"
fi
if grep -rnE 'namespace *\{|using namespace' include; then
  bad "no unnamed namespaces and no 'using namespace' in headers"
fi
[ $status -eq 0 ] && echo "$n headers, $edges includes, all of them downwards"
exit $status
