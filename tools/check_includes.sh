#!/usr/bin/env bash
# The layers of the headers. Includes go down the list of layers below, never up: the core, then its umbrella
# chunkattn.hpp, then the components, then all.hpp; so the core includes no component. In a layer no two headers
# include each other in a circle. The CPU and the CUDA backend do not know each other, and plans read the tree
# through one header. The modules of examples/serve have a list of their own.
set -eu
cd "$(dirname "$0")/.."
layers="support tree plan kv attention cpu cuda core events transfer cache interop tiers runtime c debug all"
public() {  # public LAYER: its headers that users include, outside of its folder
  case $1 in
    support) echo version error element executor allocator plan_view tree_options fwd ;;
    tree) echo sequence step prefix_tree ;;
    plan) echo attention_plan ;;
    kv) echo kv_view kv_cache ;;
    attention) echo attention_options head_rows variants merge_state ;;
    cpu) echo chunk_attention ;;
    cuda) echo cuda ;;
    core) echo chunkattn ;;
    all) echo all ;;
  esac
}
tree_reader=detail/tree/step_reader.hpp
max_lines=500  # of a file, with its comments
status=0
bad() { echo "FAILED: $*"; status=1; }

declare -A rank=() layer_of=() arrows=() includes=()
n=0
for layer in $layers; do
  rank[$layer]=$((n += 1))
  for name in $(public "$layer"); do layer_of[$name]=$layer; done
done
find_layer() {  # find_layer HEADER: in `found`, empty where there is none
  local rest=${1#detail/}
  if [ "${rest%%/*}" != "$rest" ]; then found=${rest%%/*}; else found=${layer_of[${1%.*}]:-}; fi
}

headers=0 edges=0
while read -r path; do
  header=${path#include/chunkattn/}
  headers=$((headers + 1))
  find_layer "$header"
  layer=$found
  [ -n "${rank[$layer]:-}" ] || { bad "$header is in no known layer, of $layers"; continue; }
  lines=$(wc -l <"$path")
  [ "$lines" -le $max_lines ] || bad "$header has $lines lines, more than $max_lines: one idea per file"
  while read -r name; do
    target=$(realpath -m --relative-to=include/chunkattn "include/chunkattn/$(dirname "$header")/$name")
    edges=$((edges + 1))
    includes[$header]="${includes[$header]:-} $target"
    [ -f "include/chunkattn/$target" ] || bad "$header includes $name, which does not exist"
    find_layer "$target"
    to=$found
    if [ "$to" != "$layer" ]; then
      arrows[$layer:$to]=1
      [ "${rank[$to]:-99}" -lt "${rank[$layer]}" ] || bad "$header includes $target, of a layer above its own"
    fi
    case $layer:$to in cpu:cuda | cuda:cpu) bad "$header includes $target of the other backend" ;; esac
    case $layer:$target in
      plan:$tree_reader) ;;
      plan:detail/tree/*) bad "$header includes $target: plans read the tree through $tree_reader" ;;
    esac
    case $header:$target in
      chunkattn.hpp:*.cuh | runtime/make_attention.hpp:*.cuh) ;;
      *.hpp:*.cuh) bad "$header includes $target: a .hpp must compile without nvcc" ;;
    esac
  done < <(sed -nE 's/^ *#include "([^"]+)".*/\1/p' "$path")
done < <(find include/chunkattn -name '*.hpp' -o -name '*.cuh' | sort)

# Circles: take away headers all of whose includes are taken away, until nothing changes.
left=("${!includes[@]}")
while :; do
  declare -A stays=()
  for header in "${left[@]}"; do stays[$header]=1; done
  next=()
  for header in "${left[@]}"; do
    for target in ${includes[$header]}; do
      if [ -n "${stays[$target]:-}" ]; then next+=("$header"); break; fi
    done
  done
  [ ${#next[@]} -gt 0 ] || break
  [ ${#next[@]} -lt ${#left[@]} ] || { bad "these include each other in a circle: ${next[*]}"; break; }
  left=("${next[@]}")
  unset stays
done

while read -r path; do
  [ "$(grep -vE '^(//.*|#pragma once)?$' "$path" | head -1)" = "#if defined(_WIN32)" ] ||
    bad "$path is for Windows by its name, and does not begin with #if defined(_WIN32)"
done < <(find include/chunkattn -name '*_windows.hpp')

# Nothing public includes the standard streams, fmt or CUB's umbrella; no unnamed namespaces.
if grep -rnE '^ *#include <(iostream|ostream|istream|sstream|fstream|iomanip|print|format|regex|fmt/.*|cub/cub.cuh)>' include; then
  bad "the includes above are too heavy for a public header"
fi
if grep -rnE 'namespace *\{|using namespace' include; then
  bad "no unnamed namespaces and no 'using namespace' in headers"
fi
# examples/serve is an engine with modules of its own; each knows only those before it in this list. The
# commands stand beside main.cpp.
serve=examples/serve
declare -A serve_rank=() serve_arrows=()
n_serve=0
for module in ranks model text engine parallel load server commands; do serve_rank[$module]=$((n_serve += 1)); done
serve_module() {  # serve_module FILE: in `found`
  local rest=${1#"$serve"/}
  if [ "${rest%%/*}" = "$rest" ]; then found=commands; else found=${rest%%/*}; fi
}
while IFS=: read -r path include; do
  target=$(realpath -m --relative-to=. "$(dirname "$path")/${include#*\"}")
  case $target in "$serve"/*) ;; *) continue ;; esac
  serve_module "$path"
  module=$found
  serve_module "$target"
  [ "$module" != "$found" ] || continue
  serve_arrows[$module:$found]=1
  [ "${serve_rank[$found]:-99}" -lt "${serve_rank[$module]:-0}" ] || bad "$path includes $target, of a layer above its own"
done < <(grep -roE '^ *#include "[^"]+' $serve --include='*.hpp' --include='*.cpp' --exclude-dir=tests | sort)
[ ${#serve_arrows[@]} -gt 0 ] || bad "no includes between the modules of $serve were found"

[ $status -eq 0 ] && echo "$headers headers in $n layers, $edges includes, ${#arrows[@]} arrows between layers," \
  "all downwards; $n_serve modules of $serve, ${#serve_arrows[@]} arrows"
exit $status
