// CacheEvents: publishes the changes of what prompts can find in a tree, one by one, and all that
// they can find now as a snapshot.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "../detail/support/array.hpp"
#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../detail/tree/core.hpp"
#include "../detail/tree/depth_first.hpp"
#include "cache_event.hpp"
#include "detail/event_publisher.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// What prompts can find: to begin with before events come, or after some were missed.
template <class Token>
struct CacheSnapshot {
  std::uint64_t stream = 0;        ///< of the events that follow
  std::uint64_t number = 0;        ///< of the last event before it
  std::int32_t unit = 1;           ///< tokens that are found or not as one
  std::vector<CacheEvent> spans;   ///< all of them `stored`, each after its parent
  std::vector<Token> tokens;       ///< CacheEvent::length for each, one after the other
  std::vector<CacheEvent> kept{};  ///< what components have of these
  /// Of each of these components: a prompt can be resumed where so many tokens before, or all, are
  /// kept: `window` - 1 for WindowedLayers, 1 for Checkpoints.
  std::vector<std::int32_t> reach{};
};

/// Publishes what prompts can find in a tree, until it is destroyed or the tree is. A tree may have
/// several, which do not know each other; each costs 16 bytes per node. Without one, the tree does
/// nothing for events.
template <class Tree>
class CacheEvents {
  using Token = typename Tree::token_type;

 public:
  /// Gets each event, with the tokens of a stored one. It must neither throw nor call the tree.
  using Sink = std::function<void(const CacheEvent&, std::span<const Token>)>;

  /// The number of a stream that no other has, also after a process was started again.
  [[nodiscard]] static std::uint64_t new_stream() {
    static std::atomic<std::uint64_t> count{0};
    const auto now = std::chrono::system_clock::now().time_since_epoch().count();
    return detail::mix_hash(static_cast<std::uint64_t>(now), ++count) | 1;
  }
  /// `sink` gets events from now on. What can be found already is in snapshot().
  /// \param stream      CacheEvent::stream, not 0; by default a new_stream()
  /// \param components  WindowedLayers, WindowedGroups and Checkpoints of the tree, which may end
  ///                    before this: what they keep is published, too, so that a router knows where
  ///                    a prompt is resumed. Its mirror begins with a snapshot().
  /// \throws InvalidArgument for stream = 0, for no sink, and for components of another tree
  template <class... Components>
  CacheEvents(Tree& tree, Sink sink, std::uint64_t stream = new_stream(),
              const Components&... components)
      : shared_(detail::TreeAccess::shared(tree)) {
    detail::check_argument(stream != 0, "stream", stream, "a number other than 0");
    detail::check_argument(sink != nullptr, "sink", "empty", "what is to get the events");
    detail::EventPublisher::Components followed;
    (detail::ResumeAccess::add(components, shared_, followed), ...);
    auto& tokens = *shared_->tree;
    publisher_ = std::make_unique<detail::EventPublisher>(
        tokens.core, stream,
        [&tokens, sink = std::move(sink)](const CacheEvent& event) {
          sink(event, tokens_of(tokens, event));
        },
        std::move(followed));
  }
  /// What is moved from publishes nothing.
  CacheEvents(CacheEvents&&) noexcept = default;
  /// Ends what was published here before.
  CacheEvents& operator=(CacheEvents&& other) noexcept {
    if (this != &other) {
      stop();
      shared_ = std::move(other.shared_);
      publisher_ = std::move(other.publisher_);
    }
    return *this;
  }
  ~CacheEvents() { stop(); }

  /// CacheEvent::stream of its events.
  [[nodiscard]] std::uint64_t stream() const { return publisher().stream(); }
  /// The number of the last event: who knows of it has missed none.
  [[nodiscard]] std::uint64_t last_event() const { return publisher().last_event(); }
  /// What can be found after the last event. Linear in the tree.
  /// \throws InvalidArgument if the tree is gone
  [[nodiscard]] CacheSnapshot<Token> snapshot() const {
    const auto& tokens = tree();
    CacheSnapshot<Token> all{stream(), last_event(), tokens.core.prefixes.unit(), {}, {}};
    detail::for_each_below_root(tokens.core, [&](detail::NodeIndex n, int) {
      publisher().for_each_published(n, [&](const CacheEvent& event) {
        const auto stored = tokens_of(tokens, event);
        all.spans.push_back(event);
        all.tokens.insert(all.tokens.end(), stored.begin(), stored.end());
      });
      publisher().for_each_kept(n, [&](const CacheEvent& event) { all.kept.push_back(event); });
    });
    all.reach = publisher().reach();
    return all;
  }

 private:
  // The stored tokens, which lie in one chunk; of other events none.
  template <class TokenTree>
  static std::span<const Token> tokens_of(const TokenTree& tree, const CacheEvent& event) {
    if (event.kind != CacheEvent::Kind::stored) return {};
    return {&tree.token_at(event.first_chunk, event.first_offset), detail::to_size(event.length)};
  }
  [[nodiscard]] const detail::EventPublisher& publisher() const {
    detail::check_argument(publisher_ != nullptr, "events", "moved-from",
                           "some that were not moved from");
    return *publisher_;
  }
  [[nodiscard]] const auto& tree() const {
    detail::check_argument(publisher().stream() != 0 && shared_->tree, "events", "orphaned",
                           "events of a tree that still exists");
    return *shared_->tree;
  }
  void stop() noexcept {
    if (publisher_ && shared_->tree) shared_->tree->core.topology.observers.remove(*publisher_);
  }

  std::remove_cvref_t<decltype(detail::TreeAccess::shared(std::declval<const Tree&>()))> shared_;
  std::unique_ptr<detail::EventPublisher> publisher_;
};

CHUNKATTN_NAMESPACE_END
