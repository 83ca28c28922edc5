#!/usr/bin/env bash
# migrate_0.3.sh [--diff] FILE_OR_FOLDER...: rewrites C++ and CUDA sources that use chunkattn 0.2 for 0.3, in place.
#
# It touches files that mention chunkattn, and of these only what 0.3 names otherwise: include paths and public names,
# members included (`.slot`, `.topology`, `.weights()`), so read the difference where members of your own have such
# names. With --diff it prints the differences and changes nothing. What no rule can do is listed as
# FILE:LINE: what to do; the exit status is then 1. Running it again changes nothing more.
set -euo pipefail

diff_only=""
if [ "${1:-}" = --diff ]; then
  diff_only=yes
  shift
fi
[ $# -gt 0 ] || { sed -n 's/^# \{0,1\}//p' "$0" | sed -n 2,7p; exit 2; }

rules=$(mktemp) unqualified=$(mktemp) changed=$(mktemp)
trap 'rm -f "$rules" "$unqualified" "$changed"' EXIT

cat >"$rules" <<'RULES'
# Headers.
/^[ \t]*#[ \t]*include[ \t]*[<"]chunkattn\// {
  s~chunkattn/tree/(prefix_tree|sequence|step|allocator)\.hpp~chunkattn/\1.hpp~
  s~chunkattn/tree/(nodes|print)\.hpp~chunkattn/prefix_tree.hpp~
  s~chunkattn/tree/(types|retention)\.hpp~chunkattn/tree_options.hpp~
  s~chunkattn/tree/add_result\.hpp~chunkattn/step.hpp~
  s~chunkattn/plan/(attention_plan|block_table)\.hpp~chunkattn/\1.hpp~
  s~chunkattn/plan/(view|arrays)\.hpp~chunkattn/plan_view.hpp~
  s~chunkattn/kv/transfer\.hpp~chunkattn/transfer.hpp~
  s~chunkattn/kv/cache\.hpp~chunkattn/kv_cache.hpp~
  s~chunkattn/kv/(view|quantized)\.hpp~chunkattn/kv_view.hpp~
  s~chunkattn/base/(element|error|executor|version)\.hpp~chunkattn/\1.hpp~
  s~chunkattn/base/element_type\.hpp~chunkattn/element.hpp~
  s~chunkattn/base/slot\.hpp~chunkattn/allocator.hpp~
  s~chunkattn/base/device\.hpp~chunkattn/fwd.hpp~
  s~chunkattn/attention/merge_state\.hpp~chunkattn/merge_state.hpp~
  s~chunkattn/attention/(options|accuracy)\.hpp~chunkattn/attention_options.hpp~
  s~chunkattn/attention/(variant|lanes)\.hpp~chunkattn/variants.hpp~
  s~chunkattn/attention/reference\.hpp~chunkattn/testing/reference.hpp~
  s~chunkattn/front/any_(attention|kv|variant)\.hpp~chunkattn/any_attention.hpp~
  s~chunkattn/(front/)?make_attention\.(hpp|cuh)~chunkattn/make_attention.hpp~
  s~chunkattn/cpu/chunk_attention\.hpp~chunkattn/chunk_attention.hpp~
  s~chunkattn/cuda/(chunk_attention|kv_cache)\.cuh~chunkattn/cuda.cuh~
}

# Slots are chunks.
s/\bSlotIndex\b/ChunkIndex/g
s/\bno_slot\b/no_chunk/g
s/\bmax_slots\b/max_pool_chunks/g
s/\bnum_slots\b/num_chunks/g
s/\bslots_(needed|available)\b/chunks_\1/g
s/\b(used|retained|evicted)_slots\b/\1_chunks/g
s/\bsplits_inside_slot\b/splits_inside_chunk/g
s/\b(first|source|target|stride|v_stride|scale_stride|bytes_per)_slot\b/\1_chunk/g
s/\bdefault_slot_limit\b/default_chunk_limit/g
s/(\.|->)slot\b/\1chunk/g

# Counts and versions of a plan, the epoch of a sequence's weights.
s/\bpiece_count\b/num_pieces/g
s/(\.|->)topology\b/\1segments_version/g
s/(\.|->)weights\(\)/\1weights_epoch()/g

# What Step::add() takes and says.
s/\bAdd(AllResult|Status)\b/AddResult/g
s/\bHoldReason\b/AddResult::Reason/g
s/\bUnknownDrafts ?\{ ?(\.count = )?([^{},]+)\}, ([A-Za-z_][A-Za-z_0-9.]*)\)/{.count = \2, .parents = \3})/g
s/\bUnknownDrafts ?\{ ?(\.count = )?([^{},]+)\}\)/{.count = \2})/g
s/(\badd\(.*, )([A-Za-z_.]*([dD]rafts|guesses|guessed)), ([A-Za-z_.]*[pP]arents)\)/\1{.tokens = \2, .parents = \4})/
s/(\badd\(([^(),]|\([^()]*\))+, ([^(),]|\([^()]*\))+, )([A-Za-z_.]*([dD]rafts|guesses|guessed))\)/\1{.tokens = \4})/

# What the tree and plans tell.
s/\b(chunkattn::)?PlanArrays\b/chunkattn::PlanView::Arrays/g
s/\bconst (chunkattn::)?NodeInfo<[^<>]*>& /const auto\& /g
s/\b(chunkattn::)?MatchResult (\w+) = /auto \2 = /g

# Options of each backend, with what is for measurements in `tuning`.
s/\bAttentionOptions\b/CpuOptions/g
s/\bCudaLimits\b/CudaOptions::Limits/g
s/\bCostModel\b/CudaOptions::Tuning/g
s/([A-Za-z_0-9)])\.model\.(ps_per_kib|alone_ps_per_kib|ps_per_mflop|task_ps|merge_ps|wait_ps|min_split_tokens)\b/\1.tuning.\2/g
s/\{\.(min_tasks|max_task_heads|min_product_lines) = ([^,{}]+)\}/{.tuning = {.\1 = \2}}/g
s/\.tuning = \{\.tuning = \{([^{}]*)\}\}/.tuning = {\1}/g
s/([A-Za-z_0-9)])\.(min_tasks|max_task_heads|min_product_lines)\b/\1.tuning.\2/g
s/\.tuning\.tuning\./.tuning./g

# The value dimension stands before the executor.
s/\b(ChunkAttention<([A-Za-z_]*::)?(Cpu|Cuda), ([^,<>]+)), ([A-Za-z_]*::)?ThreadPool>/\1>/g
s/\b(ChunkAttention<([A-Za-z_]*::)?(Cpu|Cuda), ([^,<>]+)), ([A-Za-z_]*::)?ThreadPool, ([^,<>]+)>/\1, \6>/g
s/\b(ChunkAttention<([A-Za-z_]*::)?(Cpu|Cuda), ([^,<>]+)), ((\w+::)*[A-Z]\w*[^m>, ])>/\1, \4, \5>/g
s/\b(ChunkAttention<([A-Za-z_]*::)?(Cpu|Cuda), ([^,<>]+)), ((\w+::)*[A-Z]\w*[^m>, ]), ([0-9a-zA-Z_:]*([0-9]|[dD]im))>/\1, \7, \5>/g

# (0.2's KvElement is QoElement now; KvElement takes 8-bit types, too, so what asks for it compiles as before.)
# Concepts, bases of logarithms, where an error was raised, caches behind AnyKvCache, retention policies.
s/\bCpuKvElement\b/KvElement/g
s/\bBaseE\b/LseBase::e/g
s/\bBase2\b/LseBase::two/g
s/\.where\(\)\.(file|line)\b/.\1()/g
s/\bKvCacheOf<([^<>]*)> (\w+)\(\*(\w+)\)/auto \2 = \3->as<\1>()/
s/\b(KvTypes|QoTypes)\b/ElementTypes/g
s/\b(Lru|Priority|NoRetention)\{\{(\.[^{}]*)\}\}/\1{\2}/g

# How products round.
s/\b([A-Za-z_][A-Za-z_0-9]*)\.(template )?rounding<([^<>]*)>\(\)/chunkattn::rounding_of<\3>(\1)/g
RULES

# Names that now stand in a type: with chunkattn:: everywhere, without it where the file uses the namespace.
nested=(
  TreeOptions::Sharing CpuOptions::Reduce CpuOptions::Accuracy AnyAttention::RunOptions
  PlanView::Segment PlanView::WriteTarget PlanView::RowCopy
)
for name in "${nested[@]}"; do
  word=${name##*::}
  printf '%s\n' "s/\bchunkattn::$word\b/chunkattn::$name/g" >>"$rules"
  printf '%s\n' "s/(^|[^:A-Za-z_0-9.])$word(::|[&>*{]| [a-z_]\w* ?[=;,){:(])/\1$name\2/g" >>"$unqualified"
done

# What is left to a person: pattern, then what to do.
by_hand=(
  '^[ \t]*#[ \t]*include[ \t]*[<"]chunkattn/(attention|base|cpu|cuda|front|kv|plan|tree)/|an internal header of 0.2: include what its names stand in now, or chunkattn/chunkattn.hpp'
  '\b(SpinLock|SoftmaxState|MergedState|log_sum_exp|normaliser|ChangesLogits|HidesKeys|SkipsKeys|HasSinks|ChecksItself|NodeIndex|SequenceIndex|ViewTicket)\b|no longer public'
  '\bchunkattn::cpu::|\bcuda_detail::|no longer public: detail::cpu, detail::cuda'
  '\bBoth ?<|say combine(a, b), as a type decltype(combine(A{}, B{}))'
  '\bFloatElement\b|say QoElement, or std::same_as<T, float8_e4m3>'
  '\b(SourceLocation|FailureHandler)\b|no longer public: Error::file() and line(), void (*)(const Error&)'
  '\bVariantName\b|derive a type with a member `static constexpr std::string_view name`'
  '\bUnknownDrafts\b|Drafts: {.count = n}, for a tree {.count = n, .parents = p}'
  '\b(SlotOwner|SlotSource|slot_source)\b|give the tree itself; as a template argument, class Tree'
  '\bNodeInfo\b|PrefixTree<...>::Node'
  '\bMatchResult\b|PrefixTree<...>::Match'
  '\bKvScales\b|KvView has these members itself'
  '\bRetentionBudget\b|the policies have its members: Lru{.high_watermark = n}'
  '\b(UploadCounts|ScheduleSummary)\b|for tests, in chunkattn/testing/inspect.hpp'
  '\bchunkattn::detail::|nothing in chunkattn::detail is promised'
)

with_include() {  # with_include HEADER FILE: adds it behind the file's first include of the library
  grep -q "chunkattn/$1[>\"]" "$2" || sed -i -E "0,/^([ \t]*#[ \t]*include[ \t]*)([<\"])chunkattn\/.*([>\"]).*/s//&\n\1\2chunkattn\/${1//\//\\/}\3/" "$2"
}

migrate() {  # migrate FILE
  sed -E -i -f "$rules" "$1"
  if grep -qE 'using namespace chunkattn\b' "$1"; then sed -E -i -f "$unqualified" "$1"; fi
  if grep -qE '\b(reference_attention|compare_with_reference|Reference)\b *[(<]' "$1"; then
    with_include testing/reference.hpp "$1"
  fi
  if grep -q 'chunkattn::rounding_of<' "$1"; then with_include testing/inspect.hpp "$1"; fi
  # Two headers of 0.2 may have become one.
  awk '/^[ \t]*#[ \t]*include[ \t]*[<"]chunkattn\// { if (seen[$0]++) next } { print }' "$1" >"$changed"
  cmp -s "$changed" "$1" || cat "$changed" >"$1"
}

status=0 count=0
while IFS= read -r -d '' file; do
  copy=$(mktemp)
  cp "$file" "$copy"
  migrate "$copy"
  if ! cmp -s "$file" "$copy"; then
    count=$((count + 1))
    if [ -n "$diff_only" ]; then diff -u "$file" "$copy" || true; else cat "$copy" >"$file"; fi
  fi
  for entry in "${by_hand[@]}"; do
    while IFS=: read -r line _; do
      echo "$file:$line: ${entry##*|}"
      status=1
    done < <(grep -nE -- "${entry%|*}" "$copy")
  done >&2
  rm -f "$copy"
done < <(grep -rlZ --include='*.hpp' --include='*.h' --include='*.cpp' --include='*.cc' --include='*.cxx' --include='*.cu' \
  --include='*.cuh' --include='*.inl' chunkattn "$@")
echo "$count files ${diff_only:+to be }changed"
exit $status
