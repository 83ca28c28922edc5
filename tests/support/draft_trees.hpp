// Engines that draft trees, for tests with real K/V: chats whose tokens the test knows, and for
// each row of a step the path that it must see, as a sequence of its own.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "attention_case.hpp"
#include "chunkattn/chunkattn.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "parents.hpp"
#include "tests/support/retention.hpp"

namespace test {

/// K, V or Q of the last token of a path, as a model would compute it: a function of all tokens up
/// to it.
inline void fill_row(std::span<float> row, std::span<const int> path, std::uint64_t kind) {
  std::uint64_t state = kind;
  for (const int token : path)
    state = (state ^ static_cast<std::uint64_t>(token + 1)) * 0xff51afd7ed558ccdu + (state >> 29);
  for (float& x : row) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-30f;  // in [-2, 2)
  }
}

/// The rows of a step as the test expects them: each a path of its own, which no other shares. So
/// the oracle knows neither trees nor drafts.
template <class T>
struct ApartCase {
  RandomPlan plan;
  std::unique_ptr<Storage<T>> kv;

  ApartCase(const std::vector<Tokens>& paths, int num_kv_heads, int head_dim) {
    constexpr int size = 64;
    plan.chunk_size = size;
    for (const Tokens& path : paths) {
      const auto row = static_cast<std::int32_t>(plan.row_token.size());
      const auto length = static_cast<std::int32_t>(path.size());
      const auto first = static_cast<std::int32_t>(plan.pieces.size());
      for (std::int32_t p = 0; p < length; p += size)
        plan.pieces.push_back({plan.num_chunks++, 0, std::min(size, length - p), p});
      const auto count = static_cast<std::int32_t>(plan.pieces.size()) - first;
      plan.segments.push_back({row, row + 1, first, count, 0, length, -1, 1});
      plan.row_token.push_back(row);
      plan.row_kv_len.push_back(length);
      plan.row_segment.push_back(row);
      plan.writes.push_back({chunkattn::no_chunk, 0});
    }
    plan.segments_version = chunkattn::detail::next_segments_version();
    kv = std::make_unique<Storage<T>>(plan.num_chunks, num_kv_heads, size, head_dim);
    std::vector<float> k(static_cast<std::size_t>(head_dim)), v(k);
    for (std::size_t row = 0; row < paths.size(); ++row)
      for (std::size_t p = 0; p < paths[row].size(); ++p) {
        const chunkattn::Piece& piece =
            plan.pieces[static_cast<std::size_t>(plan.segments[row].piece_begin) + p / size];
        for (int head = 0; head < num_kv_heads; ++head) {
          const auto at = static_cast<int>(p % size);
          const auto path = std::span(paths[row]).first(p + 1);
          fill_row(k, path, static_cast<std::uint64_t>(2 * head + 1));
          fill_row(v, path, static_cast<std::uint64_t>(2 * head + 2));
          store(*kv, piece.chunk, head, at, k, v);
        }
      }
  }

 private:
  static void store(Storage<T>& to, int chunk, int head, int at, const std::vector<float>& k,
                    const std::vector<float>& v) {
    T *const k_row = to.view.k_row(chunk, head, at), *const v_row = to.view.v_row(chunk, head, at);
    if constexpr (chunkattn::has_row_scales<T>) {
      const auto dim = static_cast<int>(k.size());
      *to.view.k_row_scale(chunk, head, at) = chunkattn::quantize_row(k.data(), dim, k_row);
      *to.view.v_row_scale(chunk, head, at) = chunkattn::quantize_row(v.data(), dim, v_row);
    } else {
      std::transform(k.begin(), k.end(), k_row, chunkattn::from_float<T>);
      std::transform(v.begin(), v.end(), v_row, chunkattn::from_float<T>);
    }
  }
};

/// A tree, its K/V, and steps whose rows are known.
template <class T, int HeadDim, int ChunkSize, class Retention = test::NoRetention>
class DraftEngine {
 public:
  using Tree = chunkattn::PrefixTree<int, ChunkSize, chunkattn::PoolAllocator, Retention>;
  /// A sequence and its known tokens.
  struct Chat {
    typename Tree::Sequence sequence;
    Tokens tokens;
  };

  explicit DraftEngine(int num_kv_heads_, int group_, chunkattn::TreeOptions options = {})
      : num_kv_heads(num_kv_heads_), group(group_), tree({}, options) {
    tree.set_free_sink([this](chunkattn::ChunkIndex chunk) { kv.poison(chunk); });
  }
  DraftEngine(const DraftEngine&) = delete;
  DraftEngine& operator=(const DraftEngine&) = delete;
  ~DraftEngine() { tree.set_free_sink({}); }

  Chat insert(const Tokens& prompt, chunkattn::InsertOptions options = {}) {
    return {tree.insert(prompt, options), prompt};
  }
  Chat fork(Chat& chat) { return {chat.sequence.fork(), chat.tokens}; }

  // ---- a step --------------------------------------------------------------------------------

  /// False where the chat cannot be added now.
  bool add(typename Tree::Step& step, Chat& chat, std::size_t max_tokens, const Tokens& drafts = {},
           const Parents& parents = {}) {
    const auto added = step.add(chat.sequence, max_tokens, {.tokens = drafts, .parents = parents});
    if (!added) return false;
    const chunkattn::ScheduledSequence& row = added.row();
    const auto kept = static_cast<std::size_t>(row.num_drafts);
    for (int i = 0; i < row.num_rows - row.num_drafts; ++i)
      paths.emplace_back(chat.tokens.begin(), chat.tokens.begin() + row.position + i + 1);
    for (std::size_t d = 0; d < kept; ++d) {
      Tokens path = chat.tokens;
      const Tokens branch = branch_tokens(parents, drafts, static_cast<std::int32_t>(d));
      path.insert(path.end(), branch.begin(), branch.end());
      paths.push_back(std::move(path));
    }
    return true;
  }
  /// Builds the plan, and writes K and V of the rows; slots that were never written are NaN.
  auto build(typename Tree::Step& step) {
    const auto view = plan.build(step);
    const auto layer = kv.layer(0);
    for (; poisoned < layer.num_chunks; ++poisoned) kv.poison(poisoned);
    Tokens last;
    std::vector<std::int32_t> positions;
    for (const Tokens& path : paths) {
      last.push_back(path.back());
      positions.push_back(static_cast<std::int32_t>(path.size()) - 1);
    }
    CHECK(view.tokens() == last);
    CHECK(view.positions() == positions);
    const auto row = static_cast<std::size_t>(num_kv_heads * HeadDim);
    std::vector<float> k(paths.size() * row), v(k.size());
    q.resize(k.size() * static_cast<std::size_t>(group));
    for (std::size_t r = 0; r < paths.size(); ++r) {
      for (int head = 0; head < num_kv_heads; ++head) {
        const std::size_t at = r * row + static_cast<std::size_t>(head * HeadDim);
        fill_row(std::span(k).subspan(at, HeadDim), paths[r],
                 static_cast<std::uint64_t>(2 * head + 1));
        fill_row(std::span(v).subspan(at, HeadDim), paths[r],
                 static_cast<std::uint64_t>(2 * head + 2));
      }
      const std::size_t size = row * static_cast<std::size_t>(group);
      fill_row(std::span(q).subspan(r * size, size), paths[r], 1000);
    }
    writer.write(layer, view, k, v);
    return view;
  }
  /// Ends the step; the next one begins with no rows.
  auto finish(typename Tree::Step&& step) {
    paths.clear();
    return std::move(step).finish();
  }
  /// Computes all that is known of the chats.
  void prefill(std::initializer_list<Chat*> chats) {
    auto step = tree.begin_step();
    for (Chat* chat : chats) REQUIRE(add(step, *chat, 1000000));
    (void)build(step);
    auto done = finish(std::move(step));
  }

  /// K/V of the first `length` tokens.
  std::vector<std::byte> content(const Chat& chat, std::size_t length) {
    std::vector<std::byte> bytes(kv_bytes(kv, length));
    gather_kv(chat.sequence, {0, static_cast<std::int32_t>(length)}, kv, bytes);
    return bytes;
  }

  int num_kv_heads, group;
  Tree tree;
  chunkattn::KvCache<chunkattn::Cpu, T> kv{
      tree, {.num_layers = 1, .num_kv_heads = num_kv_heads, .head_dim = HeadDim}};
  chunkattn::AttentionPlan plan;
  chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim> writer{1};
  std::vector<Tokens> paths;  // of the rows of the open step
  std::vector<float> q;
  int poisoned = 0;
};

/// The K/V of tokens that were computed one after the other, without drafts.
template <class T, int HeadDim>
std::vector<std::byte> direct_content(const Tokens& tokens, std::size_t length, int num_kv_heads) {
  DraftEngine<T, HeadDim, 64> engine(num_kv_heads, 1);
  auto chat = engine.insert(tokens);
  engine.prefill({&chat});
  return engine.content(chat, length);
}

}  // namespace test
