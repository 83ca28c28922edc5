// Tree, Sequence and Pin.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chunkattn/debug/tree.hpp>

#include "python.hpp"

namespace binding {
namespace {

using nb::literals::operator""_a;
using chunkattn::TreeOptions;
constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();

Tree make_tree(std::optional<std::size_t> max_chunks, const std::string& retention, bool learns,
               std::optional<std::size_t> high_watermark, std::optional<std::size_t> low_watermark,
               std::size_t max_pinned, const std::string& sharing, std::optional<int> min_run) {
  if (retention != "lru" && retention != "priority")
    refuse("retention", "'" + retention + "'", "'lru' or 'priority'");
  if (sharing != "token" && sharing != "chunk")
    refuse("sharing", "'" + sharing + "'", "'token' or 'chunk'");
  chunkattn::PoolAllocator allocator;
  if (max_chunks) allocator.max_chunks = *max_chunks;
  return Tree(
      std::move(allocator),
      {.sharing = sharing == "token" ? TreeOptions::Sharing::token : TreeOptions::Sharing::chunk,
       .min_run = min_run},
      {{.high_watermark = high_watermark.value_or(unlimited),
        .low_watermark = low_watermark.value_or(unlimited),
        .max_pinned = max_pinned,
        .learns = learns,
        .by_priority = retention == "priority"}});
}

nb::dict stats_of(const Tree& tree) {
  const chunkattn::TreeStats s = tree.stats();
  nb::dict all;
  const auto put = [&](const char* name, auto value) { all[name] = value; };
  put("inserts", s.inserts), put("leaves", s.leaves), put("forks", s.forks);
  put("prompt_tokens", s.prompt_tokens), put("cached_tokens", s.cached_tokens);
  put("pending_tokens", s.pending_tokens), put("preempted_inserts", s.preempted_inserts);
  put("preempted_tokens", s.preempted_tokens);
  put("preempted_cached_tokens", s.preempted_cached_tokens), put("splits", s.splits);
  put("forks_copied", s.forks_copied), put("forks_shared", s.forks_shared);
  put("copied_tokens", s.copied_tokens), put("merged_tokens", s.merged_tokens);
  put("published_tokens", s.published_tokens), put("evicted_tokens", s.evicted_tokens);
  put("evicted_chunks", s.evicted_chunks), put("failed_inserts", s.failed_inserts);
  put("failed_adds", s.failed_adds), put("steps", s.steps);
  put("cancelled_steps", s.cancelled_steps), put("live_sequences", s.live_sequences);
  put("leaving_sequences", s.leaving_sequences), put("nodes", s.nodes);
  put("used_chunks", s.used_chunks), put("retained_chunks", s.retained_chunks);
  put("stored_tokens", s.stored_tokens);
  return all;
}

/// A list of nodes as dictionaries, parents first.
nb::list nodes_of(const Tree& tree, std::int32_t max_tokens) {
  nb::list all;
  chunkattn::for_each_node(
      tree, max_tokens, [&](const chunkattn::NodeInfo<Tree::token_type>& node) {
        nb::dict entry;
        entry["id"] = node.id, entry["parent"] = node.parent;
        entry["position"] = node.position, entry["length"] = node.length;
        entry["num_sequences"] = node.num_sequences, entry["cached"] = node.cached;
        entry["tenant"] = node.name_space.tenant, entry["adapter"] = node.name_space.adapter;
        entry["first_tokens"] = node.first_tokens;
        all.append(entry);
      });
  return all;
}

void bind_sequence(nb::module_& module) {
  using Sequence = Tree::Sequence;
  nb::class_<Sequence>(module, "Sequence", "A sequence in a tree. It leaves when it is deleted.")
      .def_prop_ro("is_live", &Sequence::is_live, "Whether it has not left, and the tree exists.")
      .def_prop_ro(
          "id", [](const Sequence& s) { return static_cast<std::uint64_t>(s.id()); },
          "Its number in the tree, never used again.")
      .def("__len__", &Sequence::size)
      .def_prop_ro("num_cached", &Sequence::num_cached, "Tokens whose K/V it found written.")
      .def_prop_ro("num_uncomputed", &Sequence::num_uncomputed, "Tokens that are in no step yet.")
      .def_prop_ro("num_scheduled", &Sequence::num_scheduled, "Leading tokens that are not.")
      .def_prop_ro("num_written", &Sequence::num_written, "Leading tokens with K/V in place.")
      .def_prop_ro("num_pending", &Sequence::num_pending, "Tokens that others are to compute.")
      .def_prop_ro("num_shared", &Sequence::num_shared, "Leading tokens that others have, too.")
      .def_prop_ro("num_reserved", &Sequence::num_reserved, "Positions for outputs to come.")
      .def(
          "append",
          [](Sequence& s, nb::handle tokens) {
            s.append(std::span<const Token>(some(tokens_of(tokens))));
          },
          "tokens"_a.none(), "Adds known tokens at the end. Raises OutOfChunks.")
      .def(
          "try_append",
          [](Sequence& s, nb::handle tokens) {
            return s.try_append(std::span<const Token>(some(tokens_of(tokens))));
          },
          "tokens"_a.none(), "append() that returns False where it would raise OutOfChunks.")
      .def(
          "fork",
          [](Sequence& s, std::optional<std::size_t> length) {
            return s.fork(length.value_or(Sequence::whole));
          },
          "length"_a = nb::none(), "A second sequence with the first tokens, by default all.")
      .def(
          "try_fork",
          [](Sequence& s, std::optional<std::size_t> length) {
            return s.try_fork(length.value_or(Sequence::whole));
          },
          "length"_a = nb::none(), "fork() that returns None where it would raise OutOfChunks.")
      .def("truncate", &Sequence::truncate, "length"_a, "Goes back to the first tokens.")
      .def("take_over", &Sequence::take_over, "Computes what others were to compute.")
      .def("leave", &Sequence::leave, "Leaves the tree; the handle is empty afterwards.")
      .def(
          "tokens", [](const Sequence& s) { return array_of(s.tokens()); },
          "All its tokens, an array of int32.")
      .def("chunks_needed", &Sequence::chunks_needed, "n"_a, "Chunks that n more tokens take.")
      .def("__repr__", [](const Sequence& s) {
        if (!s.is_live()) return std::string("<chunkattn.Sequence that has left>");
        return "<chunkattn.Sequence of " + std::to_string(s.size()) + " tokens, " +
               std::to_string(s.num_shared()) + " of them shared>";
      });
}

}  // namespace

void bind_tree(nb::module_& module) {
  bind_sequence(module);
  nb::class_<Tree::Pin>(module, "Pin", "A prefix that is evicted last, until this is deleted.")
      .def("__bool__", [](const Tree::Pin& pin) { return static_cast<bool>(pin); })
      .def("__len__", &Tree::Pin::size);

  nb::class_<Tree> tree(
      module, "Tree",
      "A prefix tree of prompts: it finds what they share and hands out the chunks of their "
      "K/V.\n\n"
      "max_chunks: the budget, in chunks of Tree.chunk_size tokens; without one, as many stay "
      "cached as sequences have needed at once, or up to high_watermark. retention: 'lru' or "
      "'priority', what is evicted first; learns: by what was used again. sharing: to the 'token', "
      "or whole 'chunk's.");
  tree.attr("chunk_size") = Tree::chunk_size;
  tree.def(
          "__init__",
          [](Tree* memory, std::optional<std::size_t> max_chunks, const std::string& retention,
             bool learns, std::optional<std::size_t> high_watermark,
             std::optional<std::size_t> low_watermark, std::size_t max_pinned,
             const std::string& sharing, std::optional<int> min_run) {
            new (memory) Tree(make_tree(max_chunks, retention, learns, high_watermark,
                                        low_watermark, max_pinned, sharing, min_run));
          },
          "max_chunks"_a = nb::none(), nb::kw_only(), "retention"_a = "lru", "learns"_a = false,
          "high_watermark"_a = nb::none(), "low_watermark"_a = nb::none(), "max_pinned"_a = 0,
          "sharing"_a = "token", "min_run"_a = nb::none())
      .def_prop_ro("chunks_available", &Tree::chunks_available, "Chunks free or evictable.")
      .def_prop_ro("num_chunks", &Tree::num_chunks, "K/V memory must cover so many chunks.")
      .def_prop_ro("version", &Tree::version, "Changes when a plan may have to be rebuilt.")
      .def("stats", &stats_of, "Counts since construction, and the present state.")
      .def("nodes", &nodes_of, "max_tokens"_a = 8,
           "Its nodes, parents first: runs of tokens that the same sequences have.")
      .def("clear", &Tree::clear, "Forgets all that is cached.")
      .def("device_idle", &Tree::device_idle, "Says that no device runs a step of this tree.")
      .def("check_invariants", &chunkattn::check_invariants<Tree>, "For tests. Linear in the tree.")
      .def(
          "begin_step", [](Tree& t) { return Step{t.begin_step()}; },
          "Opens a step, of which there may be one at a time.")
      .def(
          "to_text",
          [](const Tree& t, int max_tokens) { return chunkattn::to_text(t, max_tokens); },
          "max_tokens"_a = 8, "The tree as indented text.")
      .def(
          "to_dot", [](const Tree& t, int max_tokens) { return chunkattn::to_dot(t, max_tokens); },
          "max_tokens"_a = 8, "The tree as a Graphviz graph.")
      .def("__str__", [](const Tree& t) { return chunkattn::to_text(t); })
      .def("__repr__", [](const Tree& t) {
        const chunkattn::TreeStats s = t.stats();
        return "<chunkattn.Tree: " + std::to_string(s.live_sequences) + " sequences, " +
               std::to_string(s.stored_tokens) + " tokens in " + std::to_string(s.used_chunks) +
               " chunks, " + std::to_string(s.retained_chunks) + " of them only cached>";
      });

  using Tokens = std::vector<Token>;
  using Options = chunkattn::InsertOptions;
  define_with_prompt(
      tree, "insert",
      [](Tree& t, const Tokens& tokens, const Options& o) { return t.insert(some(tokens), o); },
      "Adds a sequence, which shares the K/V of the longest prefix that is there. Raises "
      "OutOfChunks.");
  define_with_prompt(
      tree, "try_insert",
      [](Tree& t, const Tokens& tokens, const Options& o) { return t.try_insert(some(tokens), o); },
      "insert() that returns None where it would raise OutOfChunks.");
  define_with_prompt(
      tree, "match_prefix",
      [](Tree& t, const Tokens& tokens, const Options& o) {
        const auto match = t.match_prefix(tokens, o);
        return std::pair(match.cached, match.pending);
      },
      "How many of the first tokens are cached, and how many more are being computed.");
  define_with_prompt(
      tree, "chunks_needed",
      [](Tree& t, const Tokens& tokens, const Options& o) { return t.chunks_needed(tokens, o); },
      "The most chunks that insert() would take.");
  define_with_prompt(
      tree, "pin", [](Tree& t, const Tokens& tokens, const Options& o) { return t.pin(tokens, o); },
      "Protects the written prefix of the tokens from eviction.");
}

}  // namespace binding
