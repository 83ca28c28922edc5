// A mirror of one chunk size behind the handle of tree.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../detail/support/array.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../events/cache_events.hpp"
#include "../../events/mirror.hpp"
#include "../../tree_options.hpp"
#include "../tree.h"
#include "handles.hpp"
#include "records.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::c {

/// As much of a tree's type as its mirror has to know.
template <int ChunkSize>
struct TreeShape {
  using token_type = std::int32_t;
  static constexpr int chunk_size = ChunkSize;
};

template <int ChunkSize>
class MirrorOf final : public chunkattn_mirror {
 public:
  explicit MirrorOf(TreeOptions::Sharing sharing) : mirror_(sharing) {}

  std::int32_t apply(const chunkattn_event& event, const std::int32_t* tokens) override {
    const bool has_tokens = event.kind == CHUNKATTN_STORED;
    if (has_tokens && (event.length < 1 || event.length > ChunkSize)) [[unlikely]]
      fail_argument("event->length", event.length,
                    {"1 to the chunk size, ", ChunkSize, ", of a stored one"});
    const Tokens given = checked_array(tokens, has_tokens ? event.length : 0, "tokens",
                                       "event->length", "event->length tokens");
    switch (mirror_.apply(event_of(event), given)) {
      case Mirror::Applied::changed:
        return CHUNKATTN_CHANGED;
      case Mirror::Applied::repeated:
        return CHUNKATTN_REPEATED;
      case Mirror::Applied::missed:
        break;
    }
    return CHUNKATTN_MISSED;
  }
  void load(const chunkattn_snapshot& snapshot) override {
    CacheSnapshot<std::int32_t> all{snapshot.stream, snapshot.number, snapshot.unit, {}, {}};
    const auto num_spans = static_cast<std::size_t>(snapshot.num_spans);
    all.spans.reserve(num_spans);
    for (std::size_t i = 0; i < num_spans; ++i) {
      check_event(snapshot.spans[i], "snapshot->spans");
      all.spans.push_back(event_of(snapshot.spans[i]));
    }
    all.tokens.assign(snapshot.tokens, snapshot.tokens + snapshot.num_tokens);
    mirror_.load(all);
  }
  [[nodiscard]] std::size_t match(Tokens prompt, const InsertOptions& options) const override {
    return mirror_.match_prefix(prompt, options);
  }
  [[nodiscard]] std::uint64_t number() const override { return mirror_.number(); }

 private:
  using Mirror = CacheMirror<TreeShape<ChunkSize>>;
  Mirror mirror_;
};

}  // namespace detail::c
CHUNKATTN_NAMESPACE_END
