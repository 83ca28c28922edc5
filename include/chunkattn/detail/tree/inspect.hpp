// The whole tree, read: its invariants, with all that is kept incrementally counted again, for
// tests; its nodes, for programs that show or record what is shared; pictures for people.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "../../allocator.hpp"
#include "../../error.hpp"
#include "../../plan_view.hpp"
#include "../../tree_options.hpp"
#include "../base/array.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"
#include "../base/to_size.hpp"
#include "core.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Reads the records of a tree. Throws Error that names the first difference.
class TreeInspector {
 public:
  explicit TreeInspector(const TreeCore& tree)
      : tree_(tree),
        topology_(tree.topology),
        chunks_(tree.chunk_table),
        prefixes_(tree.prefixes),
        retention_(tree.retention),
        sequences_(tree.sequences),
        stats_(tree.stats),
        chunk_size_(to_size(topology_.geometry.size)) {}

  void check() const {
    check_storage();
    check_sequences();
    check_checkpoints();
  }

 private:
  struct Totals {
    std::size_t nodes = 0, places = 0, published = 0, retained = 0;
  };

  void check_storage() const {
    Array<ChunkRecord> counted(chunks_.size());
    Array<std::uint8_t> taken(chunks_.size() * chunk_size_);
    Totals totals;
    for (std::size_t i = 0; i < topology_.num_indices(); ++i) {
      const auto index = static_cast<NodeIndex>(i);
      const TreeNode& n = topology_.node(index);
      if (n.state == NodeState::unused) continue;
      ++totals.nodes;
      if (index == root_node) continue;
      check_node(n, index);
      totals.places += to_size(n.length);
      totals.published += n.state == NodeState::published ? 1 : 0;
      totals.retained += n.retained ? 1 : 0;
      topology_.for_each_run(
          n, 0, n.length, [&](ChunkIndex s, std::int32_t offset, std::int32_t run, std::int32_t) {
            for (std::int32_t o = offset; o < offset + run; ++o)
              expect(taken[to_size(s) * chunk_size_ + to_size(o)]++ == 0, "a place has one token",
                     s);
            return true;
          });
      topology_.for_each_chunk(n, [&](ChunkIndex s) {
        NodeIndex& last = counted[to_size(s)].owner;
        if (last == none || topology_.node(last).position < n.position) last = index;
        ++counted[to_size(s)].nodes;
        counted[to_size(s)].active += n.active() ? 1 : 0;
        counted[to_size(s)].pinned += n.pins > 0 ? 1 : 0;
      });
    }
    check_totals(totals);
    check_chunks(counted);
    check_pins();
  }

  // A node beside its parent.
  void check_node(const TreeNode& n, NodeIndex index) const {
    const TreeNode& parent = topology_.node(n.parent);
    expect(parent.state != NodeState::unused, "a node's parent exists", index);
    expect(n.position == parent.end(), "a node continues its parent", index);
    expect(n.written >= 0 && n.written <= n.length, "written tokens lie within the node", index);
    expect(n.scheduled >= n.written || n.written == n.length, "written was scheduled", index);
    expect(n.scheduled >= 0 && n.scheduled <= n.length, "scheduled tokens lie within the node",
           index);
    expect(n.writer == none || n.length == 0 || n.written < n.length,
           "what is written has no writer", index);
    expect(n.tail_of == none || sequences_[n.tail_of].tail == index, "a sequence's tail", index);
    expect(n.live <= parent.live && n.held <= parent.held, "counts grow towards the root", index);
    expect(n.retained == (!n.active()), "exactly the unused nodes are retained", index);
    expect(
        !n.retained || (n.state == NodeState::published && n.length > 0 && n.written == n.length &&
                        retention_.is_valued_more(parent_or_self(n), n)),
        "a retained node is published, written, and valued no more than its parent", index);
    expect(n.tail_of != none || n.length > 0, "only tails are empty", index);
    expect(n.told == (prefixes_.news.any() ? prefixes_.news.findable(n) : 0),
           "events have told what can be found", index);
    if (n.state != NodeState::published) return;
    expect(parent.state == NodeState::published, "a published node has a published parent", index);
    expect(prefixes_.find_twin(n) == index, "published children differ in their key", index);
  }

  void check_totals(const Totals& counted) const {
    std::size_t listed = 0;
    Array<const void*> passed(topology_.num_indices());
    for (const auto& list : retention_.lists_) {
      NodeIndex last = none;
      for (NodeIndex n = list.oldest; n != none; last = n, n = topology_.node(n).newer) {
        passed[to_size(n)] = &list;
        expect(passed[to_size(topology_.node(n).parent)] != &list,
               "children go before their parents", n);
        expect(topology_.node(n).older == last, "retained nodes are linked both ways", n);
        expect(retention_.key_of(topology_.node(n)) == list.key, "a retained node's list", n);
        ++listed;
      }
      expect(list.newest == last, "the newest retained node ends its list", last);
      expect(list.hand == none || passed[to_size(list.hand)] == &list, "a hand is in its list", 0);
    }
    expect_equal(counted.nodes, stats_.nodes, "number of nodes");
    expect_equal(counted.places, stats_.stored_tokens, "stored tokens");
    expect_equal(counted.published, prefixes_.num_published(), "published nodes");
    expect_equal(counted.retained, listed, "retained nodes");
    expect(tree_.shares_add_up(), "cached tokens by tenant", 0);
  }

  void check_chunks(const Array<ChunkRecord>& counted) const {
    std::size_t used = 0, cached = 0, pinned = 0;
    for (std::size_t s = 0; s < chunks_.size(); ++s) {
      const auto index = static_cast<ChunkIndex>(s);
      expect(counted[s].nodes == chunks_[index].nodes, "nodes per chunk", index);
      const NodeIndex owner = chunks_[index].owner;
      expect(counted[s].nodes == 0 || owner == none || owner == counted[s].owner,
             "nobody but the last node in a chunk owns what is behind it", index);
      expect(counted[s].active == chunks_[index].active, "active nodes per chunk", index);
      expect(counted[s].pinned == chunks_[index].pinned, "pinned nodes per chunk", index);
      pinned += counted[s].pinned > 0 ? 1 : 0;
      used += counted[s].nodes > 0 ? 1 : 0;
      cached += counted[s].nodes > 0 && counted[s].active == 0 ? 1 : 0;
    }
    expect_equal(used, stats_.used_chunks, "used chunks");
    expect_equal(cached, stats_.retained_chunks, "retained chunks");
    expect_equal(pinned, chunks_.num_pinned(), "pinned chunks");
    if (chunks_.allocator().capacity() < max_pool_chunks)
      expect_equal(used + static_cast<std::size_t>(chunks_.allocator().available()),
                   static_cast<std::size_t>(chunks_.allocator().capacity()),
                   "used and free chunks add up to the budget");
  }

  void check_pins() const {
    Array<std::int32_t> pins(topology_.num_indices());
    for (const PinRecord& pin : retention_.pins_)
      for (NodeIndex n = pin.last; n != none && n != root_node; n = topology_.node(n).parent)
        ++pins[to_size(n)];
    for (std::size_t i = 0; i < pins.size(); ++i)
      expect(topology_.node(static_cast<NodeIndex>(i)).pins == pins[i],
             "pins of paths through a node", static_cast<std::int64_t>(i));
  }

  void check_checkpoints() const {
    const CheckpointTable& all = topology_.checkpoints;
    std::size_t listed = 0, used = 0;
    for (std::int32_t i = all.oldest(); i != none; i = all[i].newer) ++used;
    for (std::size_t k = 1; k < topology_.num_indices(); ++k) {
      const auto index = static_cast<NodeIndex>(k);
      const TreeNode& n = topology_.node(index);
      std::int32_t end = n.position + n.written, on_path = 0;
      for (std::int32_t i = all.last_of(index); i != none; i = all[i].before, ++listed) {
        expect(all[i].node == index && all[i].state != nullptr, "a checkpoint is its node's", i);
        expect(all[i].position > n.position && all[i].position <= end,
               "a node's checkpoints stand behind its written tokens, the last first", i);
        expect(n.state == NodeState::published || n.state == NodeState::hidden,
               "a checkpoint can be found", i);
        end = all[i].position - 1;
      }
      for (NodeIndex p = index; p != none && end < n.position + n.written;
           p = topology_.node(p).parent)
        for (std::int32_t i = all.last_of(p); i != none; i = all[i].before) ++on_path;
      expect(on_path <= all.per_path(), "a path has not too many checkpoints", index);
    }
    expect_equal(listed, stats_.checkpoints, "checkpoints");
    expect_equal(used, stats_.checkpoints, "checkpoints in the order of their use");
    expect(stats_.checkpoints <= all.budget(), "checkpoints within their budget", 0);
  }

  void check_sequences() const {
    check_steps_and_copies();
    Array<TreeNode> counted(topology_.num_indices());
    std::size_t live = 0, leaving = 0;
    for (std::size_t i = 0; i < sequences_.num_indices(); ++i) {
      const SequenceRecord& record = sequences_[static_cast<SequenceIndex>(i)];
      if (record.state == SequenceState::unused) continue;
      (record.state == SequenceState::live ? live : leaving) += 1;
      check_path(record, static_cast<SequenceIndex>(i), counted);
    }
    for (std::size_t i = 0; i < counted.size(); ++i) {
      const auto n = static_cast<NodeIndex>(i);
      if (topology_.node(n).state == NodeState::unused) continue;
      expect(topology_.node(n).live == counted[i].live && topology_.node(n).held == counted[i].held,
             "sequences per node", n);
      expect(has_own_writer(n), "a node's writer has it on its path, live or kept for a step", n);
    }
    expect_equal(live, stats_.live_sequences, "live sequences");
    expect_equal(leaving, stats_.leaving_sequences, "leaving sequences");
  }

  // What outstanding steps and pending copies count on sequences and chunks.
  void check_steps_and_copies() const {
    Array<std::int32_t> copies_of(sequences_.num_indices()), copies(chunks_.size());
    Array<std::int32_t> steps(sequences_.num_indices()), superseded(steps.size());
    for (const StepRecord* step : tree_.steps.all()) {
      if (step->state == StepState::free)
        expect(step->aside == none, "a step that is over has no drafts", 0);
      if (step->aside != none) ++steps[to_size(step->aside)];
      if (!StepTable::is_outstanding(*step)) continue;
      for (const StepEntry& entry : step->entries) {
        ++steps[to_size(entry.sequence)];
        superseded[to_size(entry.sequence)] +=
            entry.epoch != sequences_[entry.sequence].epoch ? 1 : 0;
      }
    }
    for (const PendingCopy& copy : tree_.copies.all()) {
      ++copies[to_size(copy.rows.target_chunk)];
      ++copies_of[to_size(copy.source)];
      ++copies_of[to_size(copy.target)];
      expect(chunks_[copy.rows.source_chunk].nodes > 0 && chunks_[copy.rows.target_chunk].nodes > 0,
             "a pending copy is between chunks in use", copy.rows.target_chunk);
      const TreeNode& n = topology_.node(sequences_.node_of(copy.target, copy.position));
      const std::int32_t place = n.begin + copy.position - n.position;
      expect(topology_.chunk_of(n, place) == copy.rows.target_chunk &&
                 topology_.geometry.offset(place) == copy.rows.target_begin,
             "a pending copy goes to its path position", copy.rows.target_chunk);
    }
    for (std::size_t i = 0; i < chunks_.size(); ++i)
      expect(chunks_[static_cast<ChunkIndex>(i)].pending_copies == copies[i],
             "pending copies into a chunk", static_cast<std::int64_t>(i));
    for (std::size_t i = 0; i < sequences_.num_indices(); ++i) {
      const SequenceRecord& record = sequences_[static_cast<SequenceIndex>(i)];
      if (record.state == SequenceState::unused) continue;
      expect(record.copies == copies_of[i], "pending copies from or to a sequence",
             static_cast<std::int64_t>(i));
      expect(record.steps == steps[i] && record.superseded == superseded[i],
             "outstanding steps of a sequence", static_cast<std::int64_t>(i));
    }
  }

  // A sequence's tail and its path; counts it on the nodes.
  void check_path(const SequenceRecord& record, SequenceIndex s, Array<TreeNode>& counted) const {
    const bool is_live = record.state == SequenceState::live;
    const TreeNode& tail = topology_.node(record.tail);
    expect(!is_live || (tail.tail_of == s && tail.first_child == none),
           "a live sequence has a tail of its own", s);
    expect(!is_live || tail.length == 0 || topology_.owns_end(tail),
           "a live tail owns the places behind its tokens", s);
    expect(tail.end() == record.size + record.reserved, "the path holds exactly the sequence", s);
    expect(record.cursor <= record.size + record.reserved, "what is computed has a place", s);
    std::int32_t covered = 0;
    for (NodeIndex index = record.tail; index != none; index = topology_.node(index).parent) {
      const TreeNode& n = topology_.node(index);
      (is_live ? counted[to_size(index)].live : counted[to_size(index)].held) += 1;
      covered += n.length;
      if (is_live && index != root_node && n.written < n.length)
        expect(n.writer != none, "pending K/V has a writer", index);
    }
    expect(covered == tail.end(), "the path has no gaps", s);
  }

  [[nodiscard]] bool has_own_writer(NodeIndex index) const noexcept {
    const TreeNode& n = topology_.node(index);
    if (n.writer == none) return true;
    const SequenceRecord& writer = sequences_[n.writer];
    const bool is_writing = writer.state == SequenceState::live ||
                            (writer.state == SequenceState::leaving && writer.steps > 0);
    NodeIndex i = is_writing ? writer.tail : none;
    while (i != none && i != index) i = topology_.node(i).parent;
    return i == index;
  }

  static void expect(bool ok, const char* what, std::int64_t index) {
    if (!ok) [[unlikely]]
      fail(Error(joined({"prefix tree invariant broken: ", what, " (at ", index, ")"})));
  }
  static void expect_equal(std::size_t counted, std::size_t kept, const char* what) {
    expect(counted == kept, what, static_cast<std::int64_t>(counted));
  }
  [[nodiscard]] const TreeNode& parent_or_self(const TreeNode& n) const noexcept {
    return n.parent == root_node ? n : topology_.node(n.parent);
  }

  const TreeCore& tree_;
  const Topology& topology_;
  const ChunkTable& chunks_;
  const Prefixes& prefixes_;
  const Retention& retention_;
  const SequenceTable& sequences_;
  const TreeStats& stats_;
  std::size_t chunk_size_;
};

/// Tokens of a node that are known; behind them lie places that steps have reserved.
inline std::int32_t known_length(const TreeCore& core, const TreeNode& node) {
  if (node.tail_of == none) return node.length;
  const SequenceRecord& sequence = core.sequences[node.tail_of];
  return sequence.state == SequenceState::live
             ? std::min(node.length, sequence.size - node.position)
             : node.length;
}

/// Calls f(token) for the first `count` tokens of a node, `count` at most known_length().
template <class Tree, class F>
void for_first_tokens(const Tree& tree, const TreeNode& node, std::int32_t count, const F& f) {
  TreeAccess::core(tree).topology.for_each_run(
      node, 0, count, [&](ChunkIndex chunk, std::int32_t offset, std::int32_t run, std::int32_t) {
        for (std::int32_t i = 0; i < run; ++i) f(TreeAccess::token_at(tree, chunk, offset + i));
        return true;
      });
}

/// Calls f(node, depth) for every node below the root, parents first, older siblings first.
template <class F>
void for_each_below_root(const TreeCore& core, const F& f) {
  struct Visit {
    NodeIndex node;
    int depth;
  };
  Array<Visit> stack;
  const auto push_children = [&](NodeIndex n, int depth) {
    // The youngest child is linked first, so the oldest comes to lie on top of the stack.
    for (NodeIndex c = core.topology.node(n).first_child; c != none;
         c = core.topology.node(c).next_sibling)
      stack.push_back({c, depth});
  };
  push_children(root_node, 0);
  while (!stack.empty()) {
    const auto [n, depth] = stack.back();
    stack.pop_back();
    f(n, depth);
    push_children(n, depth + 1);
  }
}

struct DefaultTokenText {
  template <class Token>
  std::string operator()(const Token& token) const {
    if constexpr (std::is_integral_v<Token>)
      return std::to_string(token);
    else
      return "?";
  }
};

/// What both pictures say of a node.
struct NodeText {
  std::string range, tokens, where, state;
};

template <class Tree, class TokenText>
NodeText describe(const Tree& tree, NodeIndex index, std::int32_t max_tokens,
                  const TokenText& token_text) {
  const TreeCore& core = TreeAccess::core(tree);
  const TreeNode& n = core.topology.node(index);
  NodeText text;
  text.range = std::to_string(n.position) + ".." + std::to_string(n.end());
  const std::int32_t known = known_length(core, n);
  const std::int32_t shown = std::max(0, std::min(known, max_tokens));
  for_first_tokens(tree, n, shown, [&](const auto& token) {
    if (!text.tokens.empty()) text.tokens += ' ';
    text.tokens += token_text(token);
  });
  if (known > shown) text.tokens += shown > 0 ? " ..." : "...";
  if (n.length > known) text.tokens += " +" + std::to_string(n.length - known) + " reserved";
  std::int32_t count = 0;
  core.topology.for_each_run(
      n, 0, n.length, [&](ChunkIndex chunk, std::int32_t offset, std::int32_t run, std::int32_t) {
        if (++count > 3) return false;
        if (count > 1) text.where += ' ';
        text.where += std::to_string(chunk) + "[" + std::to_string(offset) + ":" +
                      std::to_string(offset + run) + "]";
        return true;
      });
  if (count > 3) text.where += " ...";
  if (n.retained)
    text.state = "cached";
  else if (n.live == 0)
    text.state = "leaving";
  else
    text.state = std::to_string(n.live) + (n.live == 1 ? " sequence" : " sequences");
  if (n.written < n.length) text.state += ", " + std::to_string(n.written) + " written";
  if (n.pins > 0) text.state += ", pinned";
  if (n.tail_of != none) text.state += ", tail of #" + std::to_string(n.tail_of);
  if (n.name_space.is_public) text.state += ", public";
  if (n.name_space.tenant != 0) text.state += ", tenant " + std::to_string(n.name_space.tenant);
  if (n.name_space.adapter != 0) text.state += ", adapter " + std::to_string(n.name_space.adapter);
  return text;
}

inline std::string quoted_for_dot(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n')
      out += "\\n";
    else
      out += c;
  }
  return out;
}

// ---- what the face's functions of the same purpose return ------------------------------------

/// for_each_node()
template <class Tree, class F>
void visit_nodes(const Tree& tree, std::int32_t max_tokens, const F& f) {
  const TreeCore& core = TreeAccess::core(tree);
  typename Tree::Node info;
  for_each_below_root(core, [&](NodeIndex n, int) {
    const TreeNode& node = core.topology.node(n);
    const std::int32_t known = known_length(core, node);
    if (known <= 0) return;  // a sequence's tail before its first token
    info.id = n;
    info.parent = node.parent;
    info.position = node.position;
    info.length = known;
    info.num_sequences = node.live;
    info.cached = node.retained;
    info.name_space = node.name_space;
    info.first_tokens.clear();
    for_first_tokens(tree, node, std::min(known, std::max(max_tokens, 0)),
                     [&](const auto& token) { info.first_tokens.push_back(token); });
    f(static_cast<const typename Tree::Node&>(info));
  });
}

/// to_text()
template <class Tree, class TokenText>
std::string text_of(const Tree& tree, std::int32_t max_tokens, const TokenText& token_text) {
  const TreeCore& core = TreeAccess::core(tree);
  const TreeStats stats = tree.stats();
  std::string out = std::to_string(stats.live_sequences) + " sequences, " +
                    std::to_string(stats.nodes - 1) + " nodes, " +
                    std::to_string(stats.used_chunks) + " chunks (" +
                    std::to_string(stats.retained_chunks) + " cached)\n";
  for_each_below_root(core, [&](NodeIndex n, int depth) {
    const NodeText text = describe(tree, n, max_tokens, token_text);
    out.append(static_cast<std::size_t>(2 * depth), ' ');
    out += "- " + text.range + "  " + text.where + "  (" + text.state + ")";
    if (!text.tokens.empty()) out += "  " + text.tokens;
    out += '\n';
  });
  return out;
}

/// to_dot()
template <class Tree, class TokenText>
std::string dot_of(const Tree& tree, std::int32_t max_tokens, const TokenText& token_text) {
  const TreeCore& core = TreeAccess::core(tree);
  std::string out =
      "digraph prefix_tree {\n  rankdir=LR;\n  node [shape=box, fontname=monospace];\n"
      "  n0 [label=root, shape=point];\n";
  for_each_below_root(core, [&](NodeIndex n, int) {
    const NodeText text = describe(tree, n, max_tokens, token_text);
    const std::string name = "n" + std::to_string(n);
    out += "  " + name + " [label=\"" + text.range + "\\n" + quoted_for_dot(text.where) + "\\n" +
           quoted_for_dot(text.state);
    if (!text.tokens.empty()) out += "\\n" + quoted_for_dot(text.tokens);
    out += '"';
    if (core.topology.node(n).retained) out += ", style=dashed";
    if (core.topology.node(n).tail_of != none) out += ", style=rounded";
    out += "];\n  n" + std::to_string(core.topology.node(n).parent) + " -> " + name + ";\n";
  });
  return out + "}\n";
}

/// What events have told of a TokenTree, as stored events and their tokens; returns the number of
/// the last event.
template <class Tree, class Token>
std::uint64_t list_told(const Tree& tree, std::vector<CacheEvent>& spans,
                        std::vector<Token>& tokens) {
  const CacheNews& news = tree.core.prefixes.news;
  check_argument(news.any(), "event sink", "not set", "set_event_sink() before snapshot()");
  for_each_below_root(tree.core, [&](NodeIndex n, int) {
    news.for_each_told(tree.core.topology.node(n), [&](const CacheEvent& event) {
      const std::span<const Token> told = tree.tokens_of(event);
      spans.push_back(event);
      tokens.insert(tokens.end(), told.begin(), told.end());
    });
  });
  return news.last_event();
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
