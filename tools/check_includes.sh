#!/usr/bin/env bash
# The house of the headers. Its face, include/chunkattn/*.hpp, is what users name; behind it, each folder of
# include/chunkattn/detail is a room, and includes go down the list of rooms below, never up: for a header
# of the face by the room that it belongs to. Within a room no two headers include each other in a circle.
# The CPU and the CUDA backend do not know each other. The tree stands on few headers and floors, a floor being
# a header above those that it includes, and plans read it through one header. The rooms of
# examples/serve have a list of their own.
set -eu
cd "$(dirname "$0")/.."
rooms="base tree plan kv attention cpu cuda front top"  # lowest first; top: above all rooms
face() {  # face ROOM: its headers that users include
  case $1 in
    base) echo version error element executor allocator plan_view tree_options fwd ;;
    tree) echo sequence step prefix_tree ;;
    plan) echo attention_plan block_table ;;
    kv) echo kv_view kv_cache transfer experimental/tier_store experimental/tiers ;;
    attention) echo attention_options variants merge_state testing/reference testing/inspect ;;
    cpu) echo chunk_attention ;;
    cuda) echo cuda ;;
    front) echo any_attention make_attention ;;
    top) echo chunkattn ;;
  esac
}
max_face=24 max_rooms=15 max_arrows=30 max_lines=500
max_tree=15 max_floors=10 tree_reader=detail/tree/step_reader.hpp
status=0
bad() { echo "FAILED: $*"; status=1; }

declare -A rank=() room_of=() arrows=() includes=()
n=0
for room in $rooms; do
  rank[$room]=$((n += 1))
  for name in $(face "$room"); do room_of[$name]=$room; done
done
find_room() {  # find_room HEADER: in `found`, empty where there is none
  local rest=${1#detail/}
  if [ "$rest" != "$1" ]; then found=${rest%%/*}; else found=${room_of[${1%.*}]:-}; fi
}

headers=0 edges=0
while read -r path; do
  header=${path#include/chunkattn/}
  headers=$((headers + 1))
  find_room "$header"
  room=$found
  [ -n "${rank[$room]:-}" ] || { bad "$header is in no known room, of $rooms"; continue; }
  lines=$(wc -l <"$path")
  [ "$lines" -le $max_lines ] || bad "$header has $lines lines, more than $max_lines: one idea per file"
  while read -r name; do
    target=$(realpath -m --relative-to=include/chunkattn "include/chunkattn/$(dirname "$header")/$name")
    edges=$((edges + 1))
    includes[$header]="${includes[$header]:-} $target"
    [ -f "include/chunkattn/$target" ] || bad "$header includes $name, which does not exist"
    find_room "$target"
    to=$found
    if [ "$to" != "$room" ]; then
      arrows[$room:$to]=1
      [ "${rank[$to]:-99}" -lt "${rank[$room]}" ] || bad "$header includes $target, of a room above its own"
    fi
    case $room:$to in cpu:cuda | cuda:cpu) bad "$header includes $target of the other backend" ;; esac
    case $room:$target in
      plan:$tree_reader) ;;
      plan:detail/tree/*) bad "$header includes $target: plans read the tree through $tree_reader" ;;
    esac
    case $header:$target in
      chunkattn.hpp:*.cuh | make_attention.hpp:*.cuh) ;;
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

# Floors of the tree: each header of it one above the highest that it includes. Without circles there are no
# more rounds than headers.
declare -A floor=()
floors=0 changed=1
for ((round = 0; changed && round <= headers; ++round)); do
  changed=0
  for header in "${!includes[@]}"; do
    find_room "$header"
    [ "$found" = tree ] || continue
    height=1
    for target in ${includes[$header]}; do
      if [ "${floor[$target]:-0}" -ge $height ]; then height=$((floor[$target] + 1)); fi
    done
    if [ $height != "${floor[$header]:-0}" ]; then floor[$header]=$height changed=1; fi
    if [ $height -gt $floors ]; then floors=$height; fi
  done
done
tree=$(find include/chunkattn/detail/tree -type f | wc -l)
[ "$tree" -le $max_tree ] || bad "$tree headers in detail/tree, more than $max_tree"
[ $floors -le $max_floors ] || bad "the tree has $floors floors, more than $max_floors"

doors=$(find include/chunkattn -maxdepth 1 -type f | wc -l)
[ "$doors" -le $max_face ] || bad "$doors headers in the face, more than $max_face"
[ $n -le $max_rooms ] || bad "$n rooms, more than $max_rooms"
[ ${#arrows[@]} -le $max_arrows ] || bad "${#arrows[@]} arrows between rooms, more than $max_arrows"

# Nothing public includes the standard streams, fmt or CUB's umbrella; no unnamed namespaces.
if grep -rnE '^ *#include <(iostream|ostream|istream|sstream|fstream|iomanip|print|format|regex|fmt/.*|cub/cub.cuh)>' include; then
  bad "the includes above are too heavy for a public header"
fi
if grep -rnE 'namespace *\{|using namespace' include; then
  bad "no unnamed namespaces and no 'using namespace' in headers"
fi
# examples/serve is an engine with rooms of its own; each knows only those before it in this list. The
# commands stand beside main.cpp.
serve=examples/serve
declare -A serve_rank=() serve_arrows=()
n_serve=0
for room in ranks model text engine parallel load server commands; do serve_rank[$room]=$((n_serve += 1)); done
serve_room() {  # serve_room FILE: in `found`
  local rest=${1#"$serve"/}
  if [ "${rest%%/*}" = "$rest" ]; then found=commands; else found=${rest%%/*}; fi
}
while IFS=: read -r path include; do
  target=$(realpath -m --relative-to=. "$(dirname "$path")/${include#*\"}")
  case $target in "$serve"/*) ;; *) continue ;; esac
  serve_room "$path"
  room=$found
  serve_room "$target"
  [ "$room" != "$found" ] || continue
  serve_arrows[$room:$found]=1
  [ "${serve_rank[$found]:-99}" -lt "${serve_rank[$room]:-0}" ] || bad "$path includes $target, of a room above its own"
done < <(grep -roE '^ *#include "[^"]+' $serve --include='*.hpp' --include='*.cpp' --exclude-dir=tests | sort)
[ ${#serve_arrows[@]} -gt 0 ] || bad "no includes between the rooms of $serve were found"

[ $status -eq 0 ] && echo "$headers headers ($doors in the face) in $n rooms, $edges includes, ${#arrows[@]} arrows between rooms, all downwards;" \
  "the tree: $tree headers on $floors floors;" \
  "$n_serve rooms of $serve, ${#serve_arrows[@]} arrows"
exit $status
