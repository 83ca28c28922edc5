"""Survivors that cannot be told from the original by what the library promises, and why.

Found by looking at each survivor of past samples; an entry matches a fault whose lines contain
`original` before and `becomes` after. The report lists them apart from the others. An entry is no
way out for a fault that a test could notice: write that test.
"""

PADDED = "one step more, into memory that is padded for it or written again before it is read"
AGAIN = "the same work once more, or work on nothing"
SAME = "the same value where the two differ"
OVERWRITTEN = "written again before it is read"
NEVER = "the case that differs cannot come up"
CHOICE = "another of several right ways"


def _cpu(name, original, becomes, reason):
    return dict(header=f"*/cpu/*{name}.hpp", original=original, becomes=becomes, reason=reason)


EXPLAINED = [
    _cpu("block", "i < run.count", "i <= run.count", PADDED),
    _cpu("block", "k[count + i] = k[count - 1]", "k[count - 1 + i]", "the last of 16 repeats is not needed"),
    _cpu("line_state", "n * dim, dim * stride + n", "", "sizes are rounded up and have a tile to spare; the order of parts "
         "of equal total does not matter"),
    _cpu("line_state", "total += rounded(size)", "rounded(size - 1)", "sizes are multiples of 16 but on narrow vectors"),

    _cpu("engine", "plan.num_copies > 0", "plan.num_copies >= 0", AGAIN),
    _cpu("engine", "parallel_for(calls", "calls + 1", AGAIN),
    _cpu("engine", "(call + 1) * rows_per_call", "(call + (1 + 1))", AGAIN + ": writing twice is harmless"),
    _cpu("engine", "block.unit_count > 1", "block.unit_count >= 1", CHOICE + ": one unit merged with nothing"),
    _cpu("engine", "head < lines.head_end; ++head", "head <= lines.head_end", PADDED),
    _cpu("engine", "workers_.resize(", "threads + 1", "a worker more that nobody uses"),
    _cpu("engine", "std::fill_n(result, HeadDim, 0.0f)", "HeadDim + 1", OVERWRITTEN + ", or not read again"),
    _cpu("engine", "line < lines; line += block", "line <= lines", PADDED),

    _cpu("chunk_first", "i < width; ++i) any", "i <= width", "at the most a needless factor of 1"),
    _cpu("chunk_first", "l < num_lines; ++l)", "l <= num_lines", "more tokens are looked at, and masked"),
    _cpu("chunk_first", "begin < seen_by_any", "begin <= seen_by_any", AGAIN),
    _cpu("chunk_first", "tile < num_tiles", "tile <= num_tiles", AGAIN),
    _cpu("chunk_first", "int least = seen_by_any", "seen_by_any + 1", "no line sees more"),
    _cpu("chunk_first", "line_group > 4 && left >= 4", "", CHOICE + ": lines beyond the last have weight 0"),

    _cpu("partial_results", "i < HeadDim; i += width", "i <= HeadDim", PADDED),
    _cpu("partial_results", "memory_.size() < lines * stride", "<=", SAME),

    _cpu("schedule", "b > 0 && row_blocks_[b].row_begin > row", "", NEVER + ": the guess is never too high"),
    _cpu("schedule", "b + 1 < blocks", "b + 1 <= blocks", NEVER + ": the last block has the row"),
    _cpu("schedule", "row_begin < row_end) f(", "row_begin <= row_end",
         NEVER + ": what has no rows is not visible"),
    _cpu("schedule", "rows < max_block_rows_", "<=", SAME),

    _cpu("sequence_first", "j < group; ++j) logits", "j <= group", PADDED),
    _cpu("sequence_first", "t < count; t += width", "t <= count", PADDED),
    _cpu("sequence_first", "[0];", "[(0 + 1)]", SAME + ": all lanes are alike"),
    _cpu("sequence_first", "if (count == 0) return;", "deleted", AGAIN),
    _cpu("sequence_first", "new_max > old_max", "new_max >= old_max", SAME + ": exp(0)"),

    _cpu("simd", "return rows[0];", "rows[(0 - 1)]", "the array has one element, so the compiler knows the index"),
    _cpu("sequence_first", "int count = 0;", "count = (0 - 1)", SAME + ": no line sees fewer than 0"),
    _cpu("sequence_first", "if (l < used) {", "l <= used", "the line behind the last is its copy, which sees nothing: "
         "maximum and sum stay"),
    _cpu("sequence_first", "if (l < used) common =", "l <= used", CHOICE + ": all tokens are added line by line"),
    _cpu("sequence_first", "visible[l] = l < used ?", "l <= used ?", "of lines that nobody reads"),
    _cpu("sequence_first", "visible_tokens(block, state, line) : 0", ": (0 + 1)", "of lines that nobody reads"),
    _cpu("chunk_first", "if (lines.seen == 0) return;", "deleted", AGAIN),
    _cpu("line_state", "std::fill(max + begin, max + end, empty_max)", "empty_max + 1", SAME + ": 1 is nothing to 1e38"),
    _cpu("sequence_first", "t + parities <= count", "t + parities < count", CHOICE + ": the last pair goes one by one"),
    _cpu("line_state", "std::fill(out + begin * HeadDim", "out + 1 + end", PADDED),
    _cpu("engine", "JobSize{cost, 1, max_lines / group}", "(1 + 1), max_lines", AGAIN + ": the row twice"),
    _cpu("partial_results", "if (softmax.empty()) continue;", "deleted", AGAIN + ": merging nothing"),
    _cpu("engine", ": 4 * threads", "", CHOICE + ": how many tasks are wanted"),
    _cpu("task_queue", "a.size.cost > b.size.cost", "a.size.cost >= b.size.cost", SAME + ": they differ there"),
    _cpu("task_queue", "cost * most <= share", "cost * most < share", CHOICE),
    _cpu("task_queue", "{size(j), j, 0, 0}", "", OVERWRITTEN),
    _cpu("task_queue", "job.size.cost <= share", "job.size.cost < share", CHOICE),
    _cpu("task_queue", "parts == 1 ||", "parts == (1 - 1) ||", SAME + ": one part of one head either way"),
    _cpu("walk", "if (token_ > 0)", "token_ >= 0", SAME),
    _cpu("walk", "to_walk_ > 0", "to_walk_ >= 0", NEVER + ": a row sees no more than its path has"),

    dict(header="*executor.hpp", original="num_threads > 1 ?", becomes="", reason=SAME),
    dict(header="*executor.hpp", original="if (n <= 0) return;", becomes="", reason=AGAIN),
    dict(header="*block_table.hpp", original="misplaced = -1", becomes="-(1 + 1)", reason=SAME),
    dict(header="*block_table.hpp", original="piece.begin > 0 && indices_.size() > before",
         becomes="piece.begin >= 0 &&", reason=NEVER + ": a path enters a slot at its start once"),
    dict(header="*block_table.hpp", original="piece.begin > 0 && indices_.size() > before",
         becomes="piece.begin > (0 - 1)", reason=NEVER + ": a path enters a slot at its start once"),
    dict(header="*block_table.hpp", original="indices_.size() > before", becomes="indices_.size() >= before",
         reason=NEVER + ": a path begins at the start of a slot"),
    dict(header="*prefix_tree.hpp", original="shared_.reset();", becomes="deleted",
         reason="a pin's generation ends with it: unpinning again does nothing"),
    dict(header="*detail/tree/shared_tree.hpp", original="break;", becomes="deleted",
         reason="nothing follows, or the next case, which passes over a step that was just dropped"),
    dict(header="*detail/tree/prefixes.hpp", original="if (keep < n.length) topology_.release_places", becomes="keep <= n.length",
         reason=AGAIN),
    _cpu("chunk_first", "at < Vectors * width; at += 16", "at <= Vectors", "a cache line more is prefetched"),
    _cpu("chunk_first", "begin < lines.seen; begin += logit_tokens", "begin <= lines.seen", AGAIN),
    _cpu("chunk_first", "t + value_step <= count", "t + value_step < count", CHOICE + ": the rest goes token by token"),
    _cpu("block", "k_scale[count + i] = 0", "deleted", "logits of the last of 16 repeats are masked, whatever they are"),
    _cpu("schedule", "options_.num_kv_heads < options_.min_tasks", "<=", CHOICE + ": how many tasks are wanted"),
    _cpu("engine", "workers_.size() < static_cast<std::size_t>(threads)", "<=", AGAIN),
    dict(header="*testing/reference.hpp", original="size <= std::numeric_limits<double>::max()", becomes="size < std::numeric",
         reason="only the largest of all numbers differs"),
    dict(header="*testing/reference.hpp", original="ratio > report.worst", becomes="ratio >= report.worst",
         reason=CHOICE + ": of two that are equally bad"),
    dict(header="*detail/tree/prefixes.hpp", original="mix_hash(static_cast<std::uint32_t>(parent), space.tenant)", becomes="",
         reason=CHOICE + ": a hash only proposes, parents are compared"),
    dict(header="*detail/tree/prefixes.hpp", original="n.older = n.newer = none;", becomes="", reason=OVERWRITTEN),
    dict(header="*detail/tree/sequences.hpp", original="if (begin == range.begin) return;", becomes="deleted", reason=AGAIN),
    dict(header="*detail/tree/token_tree.hpp", original="if (match.length == 0) return none;", becomes="deleted",
         reason=SAME + ": a pin of no tokens, held by an index or not"),
    dict(header="*detail/tree/slots.hpp", original="if (count <= 0) return true;", becomes="", reason=AGAIN),
    dict(header="*detail/tree/core.hpp", original="if (range.empty()) return;", becomes="deleted", reason=AGAIN),
    dict(header="*detail/tree/core.hpp", original="count <= at(max_length - record.size)", becomes="count < at",
         reason="the one length that differs is of 2^30 tokens"),
    dict(header="*detail/tree/topology.hpp", original="if (count <= 0) return;", becomes="if (count < 0)", reason=NEVER),
    dict(header="*detail/tree/topology.hpp", original="held > 1 ? slots_[s].prev : no_slot", becomes="held >= 1",
         reason="the slot before the first is not looked at"),
    dict(header="*detail/tree/child_index.hpp", original="2 * count + 2 <= table_.size()", becomes="(2 + 1)", reason=CHOICE + ": tables are even"),
    dict(header="*kv_cache.hpp", original="table_capacity_ = capacity;", becomes="deleted", reason="tables grow each time, by as much as is needed"),
    dict(header="*detail/tree/copies.hpp", original="rows = at(topology_.chunk.size)", becomes="chunk.size - 1",
         reason="a fork copies fewer rows than a chunk has"),
    dict(header="*detail/tree/core.hpp", original="plan.copied > 0 && plan.shared == 0", becomes="plan.copied >= 0",
         reason=NEVER + ": a fork copies or shares something of the last node"),
    dict(header="*testing/reference.hpp", original="i < kv.head_dim; ++i) row[i]", becomes="i <= kv.head_dim",
         reason=PADDED),
    dict(header="*kv_cache.hpp", original="if (needed > num_slots_) grow(needed);", becomes="needed >= num_slots_", reason=AGAIN),
    dict(header="*plan/plan_builder.hpp", original="continue;", becomes="deleted",
         reason=SAME + ": a frame that leaves has no next node, which the next line asks"),
    dict(header="*prefix_tree.hpp", original="shared_->expect_handle();", becomes="deleted",
         reason="memory for handles that other threads drop is set aside earlier or later"),
    dict(header="*sequence.hpp", original="nodes.push_back({n, offset, length, 0});", becomes="(0 + 1)",
         reason="a field that is not read there"),
    dict(header="*sequence.hpp", original='"sequence", "left"', becomes="deleted",
         reason=NEVER + ": a handle is emptied when its sequence leaves"),
    dict(header="*detail/tree/shared_tree.hpp", original="number = threads.fetch_add(1", becomes="(1 - 1)",
         reason=CHOICE + ": numbers from 0, of which the first is drawn twice"),
    dict(header="*detail/tree/prefixes.hpp", original="space.is_public ? 2 : 1", becomes="",
         reason=CHOICE + ": a hash only proposes, the name spaces are compared"),
    dict(header="*detail/tree/core.hpp", original="unwritten <= few_tokens ?", becomes="unwritten < few_tokens",
         reason=CHOICE + " to divide what is to compute"),
    dict(header="*detail/tree/core.hpp", original="match.used > 0 && match.used <", becomes="match.used > (0 - 1)",
         reason=NEVER + ": only at the root, which has no tokens"),
    dict(header="*detail/tree/sequences.hpp", original="if (record.reserved == 0) return;", becomes="deleted",
         reason=AGAIN + ": it is called without places only for sequences that no step has"),
    dict(header="*detail/tree/token_store.hpp", original="if (num_slots * ChunkSize <= tokens_.size()) return;", becomes="deleted",
         reason=NEVER + ": it is only asked to grow"),
    dict(header="*detail/tree/child_index.hpp", original="2 * count + 2 <= table_.size()", becomes="2 * count + 2 < table_.size()",
         reason=CHOICE + ": it grows one entry earlier"),
    dict(header="*quantized.hpp", original="from[i] < 0 ?", becomes="from[i] <= 0", reason=SAME + ": -0"),
    dict(header="*quantized.hpp", original="largest > 0 ?", becomes="largest >= 0",
         reason="0 * infinity, which this machine stores as 0"),
]
