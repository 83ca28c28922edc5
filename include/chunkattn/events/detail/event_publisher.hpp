// EventPublisher: follows the nodes of a tree, and says by events what prompts can find.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"
#include "../../detail/tree/node_observer.hpp"
#include "../cache_event.hpp"
#include "resume_points.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Of each node the leading tokens that are published: those that are written, if all of its
/// parents' are. Both halves of a node that is split stay parts of one span.
class EventPublisher final : public NodeObserver, private ResumeWatch {
 public:
  using Sink = std::function<void(const CacheEvent&)>;
  using Components = std::vector<std::shared_ptr<ResumePoints>>;

  /// Publishes from now on. What can be found already is in for_each_published().
  EventPublisher(TreeCore& core, std::uint64_t stream, Sink sink, Components components)
      : core_(core), stream_(stream) {
    reserve(core.topology.capacity());
    on_written(root_node);
    if (last_span_ > 0) ++last_event_;  // who has missed something finds a gap
    for (const auto& component : components) component->reserve_watch();
    core.topology.observers.add(*this);
    sink_ = std::move(sink);
    components_ = std::move(components);
    for (const auto& component : components_) component->watch(*this);
  }
  ~EventPublisher() override {
    for (const auto& component : components_) component->unwatch(*this);
  }
  EventPublisher(const EventPublisher&) = delete;
  EventPublisher& operator=(const EventPublisher&) = delete;

  [[nodiscard]] std::uint64_t stream() const noexcept { return stream_; }
  [[nodiscard]] std::uint64_t last_event() const noexcept { return last_event_; }
  /// Calls f(event), as if it became known just now, for what is published of a node.
  template <class F>
  void for_each_published(NodeIndex n, const F& f) const {
    for_each_chunk(node(n), 0, published(n).length,
                   [&](ChunkIndex chunk, std::int32_t first, std::int32_t count) {
                     f(event(CacheEvent::Kind::stored, last_event_, n, first, count, chunk));
                   });
  }
  /// The same of what components keep of it.
  template <class F>
  void for_each_kept(NodeIndex n, const F& f) const {
    struct Each final : ResumeWatch {
      const EventPublisher& publisher;
      const F& f;
      Each(const EventPublisher& of, const F& call) : publisher(of), f(call) {}
      void on_kept(const ResumePoints& of, NodeIndex n, std::int32_t first, std::int32_t count,
                   bool) override {
        f(publisher.event_of(of, publisher.last_event_, n, first, count, true));
      }
    } each(*this, f);
    for (const auto& component : components_) component->tell_kept(each, n, 0, published(n).length);
  }
  /// What they reach back.
  [[nodiscard]] std::vector<std::int32_t> reach() const {
    std::vector<std::int32_t> all;
    for (const auto& component : components_) all.push_back(component->reach());
    return all;
  }

  // ---- what the tree says --------------------------------------------------------------------

  void reserve(std::size_t num_nodes) override {
    if (num_nodes > nodes_.size()) nodes_.resize(num_nodes);
  }
  void on_split(NodeIndex lower, NodeIndex upper) noexcept override {
    Published& rest = published(lower);
    const std::int32_t kept = (std::min)(rest.length, node(upper).length);
    published(upper) = {kept, rest.span};
    rest.length -= kept;
  }
  void on_release(NodeIndex n, std::int32_t keep) noexcept override {
    Published& all = published(n);
    if (all.length <= keep) return;
    const ChunkIndex chunk = core_.topology.chunk_of(node(n), node(n).begin + keep);
    publish(CacheEvent::Kind::evicted, n, keep, all.length - keep, chunk);
    all.length = keep;
  }
  void on_merge(NodeIndex, NodeIndex) noexcept override {}  // the duplicate was private
  [[nodiscard]] bool follows_writes() const noexcept override { return true; }
  /// Goes down from a node as long as something comes to be found.
  void on_written(NodeIndex top) noexcept override {
    for (NodeIndex i = top;;) {
      const bool all = i == root_node || publish_stored(i);
      if (all && node(i).first_child != none) {
        i = node(i).first_child;
        continue;
      }
      while (i != top && node(i).next_sibling == none) i = node(i).parent;
      if (i == top) return;
      i = node(i).next_sibling;
    }
  }
  void on_clear() noexcept override {
    for (Published& all : nodes_) all.length = 0;
    if (sink_)
      sink_({.kind = CacheEvent::Kind::cleared, .stream = stream_, .number = ++last_event_});
  }
  [[nodiscard]] bool is_consistent() const override {
    for (std::size_t i = 1; i < core_.topology.num_indices(); ++i)
      if (published(static_cast<NodeIndex>(i)).length != findable(static_cast<NodeIndex>(i)))
        return false;
    return true;
  }

 private:
  struct Published {
    std::int32_t length = 0;
    std::uint64_t span = 0;
  };

  [[nodiscard]] const TreeNode& node(NodeIndex n) const noexcept { return core_.topology.node(n); }
  [[nodiscard]] Published& published(NodeIndex n) noexcept { return nodes_[to_size(n)]; }
  [[nodiscard]] const Published& published(NodeIndex n) const noexcept {
    return nodes_[to_size(n)];
  }
  /// Leading tokens of a node that a prompt finds with their K/V.
  [[nodiscard]] std::int32_t findable(NodeIndex index) const noexcept {
    const TreeNode& n = node(index);
    if (n.state != NodeState::published || published(n.parent).length < node(n.parent).length)
      return 0;
    return n.written - n.written % core_.prefixes.unit();
  }
  /// Whether with this all of the node is published.
  bool publish_stored(NodeIndex n) noexcept {
    const std::int32_t end = findable(n);
    Published& all = published(n);
    if (end <= all.length) return false;
    if (all.length == 0) all.span = ++last_span_;
    const std::int32_t begin = std::exchange(all.length, end);
    for_each_chunk(node(n), begin, end,
                   [&](ChunkIndex chunk, std::int32_t first, std::int32_t count) {
                     publish(CacheEvent::Kind::stored, n, first, count, chunk);
                   });
    for (const auto& component : components_) component->tell_kept(*this, n, begin, end - begin);
    return end == node(n).length;
  }
  template <class F>
  void for_each_chunk(const TreeNode& n, std::int32_t first, std::int32_t end, const F& f) const {
    core_.topology.for_each_run(n, first, end - first,
                                [&](ChunkIndex chunk, std::int32_t, std::int32_t count,
                                    std::int32_t done) { f(chunk, first + done, count); });
  }
  void publish(CacheEvent::Kind kind, NodeIndex n, std::int32_t first, std::int32_t count,
               ChunkIndex chunk) noexcept {
    if (sink_) sink_(event(kind, ++last_event_, n, first, count, chunk));
  }
  // Of what is published.
  void on_kept(const ResumePoints& of, NodeIndex n, std::int32_t first, std::int32_t count,
               bool is_kept) override {
    count = (std::min)(count, published(n).length - first);
    if (count > 0) sink_(event_of(of, ++last_event_, n, first, count, is_kept));
  }
  [[nodiscard]] CacheEvent event_of(const ResumePoints& component, std::uint64_t number,
                                    NodeIndex n, std::int32_t first, std::int32_t count,
                                    bool is_kept) const {
    CacheEvent kept = event(is_kept ? CacheEvent::Kind::kept : CacheEvent::Kind::lost, number, n,
                            first, count, core_.topology.chunk_of(node(n), node(n).begin + first));
    while (components_[to_size(kept.group)].get() != &component) ++kept.group;
    return kept;
  }
  [[nodiscard]] CacheEvent event(CacheEvent::Kind kind, std::uint64_t number, NodeIndex index,
                                 std::int32_t first, std::int32_t count,
                                 ChunkIndex chunk) const noexcept {
    const TreeNode& n = node(index);
    const std::uint64_t span = published(index).span;
    const std::uint64_t before = n.parent == root_node ? 0 : published(n.parent).span;
    return {.kind = kind,
            .stream = stream_,
            .number = number,
            .span = span,
            .parent = first > 0 ? span : before,
            .name_space = n.name_space,
            .position = n.position + first,
            .length = count,
            .first_chunk = chunk,
            .first_offset = core_.topology.geometry.offset(n.begin + first)};
  }

  TreeCore& core_;
  const std::uint64_t stream_;
  Sink sink_;
  Components components_;
  Array<Published> nodes_;
  std::uint64_t last_event_ = 0;
  std::uint64_t last_span_ = 0;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
