// Lower tiers of the engine's tree, whatever element K/V has.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <chunkattn/tiers/tiers.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "attention.hpp"
#include "engine.hpp"
#include "tier_log.hpp"

namespace serve {

/// What tenants are called by all processes that share a store: their salts.
class TenantNames {
 public:
  void add(std::uint64_t tenant, const std::string& name) {
    if (!names_.emplace(tenant, name).second) return;
    if (names_.size() > most) names_.erase(names_.begin());  // the oldest: numbers count up
  }
  /// Nothing for a tenant that has none, and for sequences that share nothing.
  [[nodiscard]] std::optional<std::string> of(const chunkattn::Namespace& space) const {
    if (space.adapter != 0) return std::nullopt;
    if (space.tenant == 0) return "nobody";
    const auto found = names_.find(space.tenant);
    if (found == names_.end() || found->second.empty()) return std::nullopt;
    return "salt " + found->second;
  }

 private:
  static constexpr std::size_t most = 20'000;
  std::map<std::uint64_t, std::string> names_;
};

template <class Tree>
class EngineTiers {
 public:
  using Sequence = typename Tree::Sequence;
  class Load {
   public:
    virtual ~Load() = default;
    [[nodiscard]] virtual bool poll(Sequence& sequence) = 0;
  };

  virtual ~EngineTiers() = default;
  /// Null if there is nothing to look for.
  [[nodiscard]] virtual std::unique_ptr<Load> load(const Sequence& sequence) = 0;
  /// As chunkattn::Tiers::find().
  [[nodiscard]] virtual std::vector<std::size_t> find(std::span<const std::int32_t> prompt,
                                                      const chunkattn::InsertOptions& options,
                                                      std::size_t begin) const = 0;
  /// Blocks that are still to be stored.
  virtual std::size_t advance(std::size_t max_blocks) = 0;
  /// Whether blocks are being offloaded.
  [[nodiscard]] virtual bool is_busy() const = 0;
  virtual void computed(std::size_t tokens, double seconds) = 0;
  /// Offloads all that is cached, before the tree is destroyed.
  virtual void store_all() = 0;
  [[nodiscard]] virtual TierCounts counts() const = 0;
};

template <class Tree, class Cache>
class EngineTiersOf final : public EngineTiers<Tree> {
  using Base = EngineTiers<Tree>;
  using TreeTiers = chunkattn::Tiers<Tree, Cache>;

 public:
  EngineTiersOf(Tree& tree, Cache& cache, const TierOptions& options,
                std::vector<std::shared_ptr<chunkattn::TierStore>> stores, const TenantNames& names,
                const TierSink& sink, chunkattn::KvCompanions<typename Tree::Sequence> companions)
      : sink_(sink),
        log_(options.published ? std::make_shared<TierLog>(media_of(options)) : nullptr),
        tiers_(tree, cache, std::move(stores), options_of(options, names, std::move(companions))) {}

  std::unique_ptr<typename Base::Load> load(const typename Base::Sequence& sequence) override {
    auto started = tiers_.load(sequence);
    if (!started) return nullptr;
    return std::make_unique<LoadOf>(std::move(started));
  }
  [[nodiscard]] std::vector<std::size_t> find(std::span<const std::int32_t> prompt,
                                              const chunkattn::InsertOptions& options,
                                              std::size_t begin) const override {
    return tiers_.find(prompt, options, begin);
  }
  std::size_t advance(std::size_t max_blocks) override {
    const std::size_t left = tiers_.advance(max_blocks);
    deliver();
    return left;
  }
  [[nodiscard]] bool is_busy() const override { return tiers_.is_busy(); }
  void computed(std::size_t tokens, double seconds) override { tiers_.computed(tokens, seconds); }
  void store_all() override {
    tiers_.store_all();
    tiers_.flush();
    deliver();
  }
  [[nodiscard]] TierCounts counts() const override {
    const auto stats = tiers_.stats();
    TierCounts counts;
    counts.loads = stats.loads;
    counts.loads_late = stats.loads_late;
    counts.loaded_tokens = stats.loaded_tokens;
    for (const auto& tier : stats.tiers) {
      counts.loaded_blocks += tier.loaded;
      counts.refused_blocks += tier.refused;
    }
    counts.stored_blocks = stats.tiers.back().stored;
    counts.stored_bytes = stats.tiers.back().stored_bytes;
    return counts;
  }

 private:
  struct LoadOf final : Base::Load {
    explicit LoadOf(typename TreeTiers::Load&& started) : load(std::move(started)) {}
    bool poll(typename Base::Sequence& sequence) override { return load.poll(sequence); }
    typename TreeTiers::Load load;
  };
  [[nodiscard]] static std::vector<TierEvent::Medium> media_of(const TierOptions& options) {
    if (options.memory_bytes == 0) return {TierEvent::Medium::files};
    return {TierEvent::Medium::memory, TierEvent::Medium::files};
  }
  void deliver() const {
    if (log_) log_->deliver(sink_);
  }
  [[nodiscard]] typename TreeTiers::Options options_of(
      const TierOptions& options, const TenantNames& names,
      chunkattn::KvCompanions<typename Tree::Sequence> companions) const {
    typename TreeTiers::Options made;
    made.model = options.model;
    made.write_through = true;
    if (options.stored == TierOptions::Stored::int8) made.stored_as = chunkattn::ElementType::int8;
    if (options.stored == TierOptions::Stored::e4m3)
      made.stored_as = chunkattn::ElementType::float8_e4m3;
    made.identity = [&names](const chunkattn::Namespace& space) { return names.of(space); };
    made.companions = std::move(companions);
    if (log_) made.observer = std::make_shared<TierLogObserver<TreeTiers>>(log_);
    return made;
  }

  const TierSink& sink_;
  const std::shared_ptr<TierLog> log_;  // null: no subscriber
  TreeTiers tiers_;
};

/// Null if there are no tiers.
/// \param companions  what is stored beside K/V
/// \throws chunkattn::InvalidArgument for a directory that cannot be written
template <class Tree>
std::unique_ptr<EngineTiers<Tree>> make_tiers(
    Tree& tree, AnyCache cache, const TierOptions& options, const TenantNames& names,
    const TierSink& sink, chunkattn::KvCompanions<typename Tree::Sequence> companions) {
  std::vector<std::shared_ptr<chunkattn::TierStore>> stores;
  if (options.memory_bytes > 0)
    stores.push_back(std::make_shared<chunkattn::MemoryTier>(options.memory_bytes));
  if (!options.directory.empty())
    stores.push_back(
        std::make_shared<chunkattn::FileTier>(options.directory, options.directory_bytes));
  if (stores.empty()) return nullptr;
  return std::visit(
      [&](auto* of) -> std::unique_ptr<EngineTiers<Tree>> {
        using Cache = std::remove_pointer_t<decltype(of)>;
        return std::make_unique<EngineTiersOf<Tree, Cache>>(tree, *of, options, std::move(stores),
                                                            names, sink, std::move(companions));
      },
      cache);
}

}  // namespace serve
