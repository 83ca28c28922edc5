// Operations of an engine on sequences between steps: each operation is drawn, predicted, applied
// and compared.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/cache/admission.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "tests/support/engine_sim_values.hpp"

namespace test {

template <class Retention, int ChunkSize>
class EngineSimOps : public EngineSimValues<Retention, ChunkSize> {
  using Base = EngineSimValues<Retention, ChunkSize>;

 public:
  using Base::Base;

 protected:
  using Base::below, Base::one_in, Base::count, Base::expect, Base::expect_refused, Base::log;
  using Base::had_none_, Base::memory_, Base::remembered_;
  using Base::text, Base::name, Base::tree_, Base::live_, Base::steps_, Base::options_;
  using typename Base::Dropped;
  using typename Base::Live, typename Base::LivePtr, typename Base::Sequence, typename Base::Tree;

  /// Chunks of the longest tail that a fork copies.
  static constexpr std::size_t fork_chunks = (2 * ChunkSize + 2) / ChunkSize;

  struct Swapped {
    SwappedSequence<SimToken> data;
    Live model;
    bool had_work;  // or an output was to come
  };
  struct Pinned {
    typename Tree::Pin handle;
    std::vector<SimToken> tokens;
    InsertOptions options;
    std::size_t size;
  };

  struct Request {
    std::vector<SimToken> prompt;
    InsertOptions options;
    std::size_t overtaken = 0;
  };

  std::vector<std::vector<SimToken>> past_prompts_;  // some come again after they were evicted

  // ---- join ----------------------------------------------------------------------------------

  std::vector<SimToken> random_prompt() {
    if (!past_prompts_.empty() && one_in(3)) return past_prompts_[below(past_prompts_.size())];
    std::vector<SimToken> prompt;
    if (!live_.empty() && !one_in(3)) {
      const Live& like = *this->any_live();
      prompt.assign(like.tokens.begin(),
                    like.tokens.begin() + static_cast<std::ptrdiff_t>(below(like.known + 1)));
    }
    if (prompt.size() > options_.max_prompt) prompt.resize(options_.max_prompt);
    std::size_t more = below(options_.max_prompt - prompt.size() + 1);
    if (prompt.empty() && more == 0) more = 1;
    if (one_in(2)) more = std::min<std::size_t>(more, prompt.empty() ? 1 : below(4));
    while (more-- > 0) prompt.push_back(this->any_token());
    return prompt;
  }
  Namespace random_namespace() {
    if (!options_.many_namespaces || !one_in(4)) return {};
    return {.tenant = below(3), .adapter = below(2)};
  }
  InsertOptions random_options(std::size_t size) {
    InsertOptions o;
    o.name_space = random_namespace();
    if (options_.many_namespaces && one_in(3)) o.public_length = below(size + 2);
    o.priority = static_cast<int>(below(3));
    if (one_in(4)) o.max_reuse = below(size + 1);
    o.compute_last = !one_in(4);
    o.share_pending = !one_in(4);
    o.preempted = one_in(8);
    return o;
  }
  Live model_of(std::span<const SimToken> prompt, const InsertOptions& o) {
    Live live;
    live.weights = this->weights_;
    live.name_space = o.name_space;
    live.priority = o.priority;
    live.public_end = std::min(o.public_length, prompt.size());
    live.public_end -= live.public_end % this->unit();
    this->set_tokens(live, prompt);
    live.findable = prompt.size() - prompt.size() % this->unit();
    return live;
  }

  void insert() {
    const std::vector<SimToken> prompt = random_prompt();
    insert(prompt, random_options(prompt.size()));
  }
  void insert(const std::vector<SimToken>& prompt, const InsertOptions& o) {
    this->settle();
    InsertOptions unlimited = o;
    unlimited.max_reuse = std::numeric_limits<std::size_t>::max();
    const auto found = tree_->match_prefix(prompt, unlimited);
    const std::size_t needed = tree_->chunks_needed(prompt, o), free = tree_->chunks_available();
    const TreeStats before = tree_->stats();
    Live live = model_of(prompt, o);
    try {
      check_match(live, found);
    } catch (const std::logic_error&) {
      this->look_at(live);
      log("found " + text(found.cached) + " and " + text(found.pending));
      throw;
    }
    std::optional<Sequence> s;
    const bool throws = one_in(2);
    const bool answered = this->attempt("insert", [&] {
      if (!throws) {
        s = tree_->try_insert(prompt, o);
        return;
      }
      try {
        s = tree_->insert(prompt, o);
      } catch (const OutOfChunks&) {
      }
    });
    if (!answered) return;
    log("insert " + text(prompt.size()) + " tokens" +
        (s ? " as #" + text(this->last_uid_ + 1) : "") + ", cached " + text(found.cached) +
        ", pending " + text(found.pending) + (o.share_pending ? "" : ", waits for nobody") +
        ", tenant " + text(o.name_space.tenant) + ", adapter " + text(o.name_space.adapter) +
        ", public " + text(live.public_end));
    expect(s.has_value() == (needed <= free) || had_none_, "admission says whether it fits");
    expect(tree_->stats().failed_inserts == before.failed_inserts + (s ? 0 : 1),
           "failed inserts are counted");
    if (!s) return count("insert failed");
    expect(free - tree_->chunks_available() <= needed, "no more chunks than admission said");
    check_counted(before, *s, o.preempted, o.share_pending ? found.pending : 0);
    joined(std::move(live), std::move(*s), o, found);
    count(o.preempted ? "insert of what was preempted" : "insert");
  }

  /// What a prompt that has joined adds to the counters.
  void check_counted(const TreeStats& before, const Sequence& s, bool preempted,
                     std::size_t pending) {
    const TreeStats now = tree_->stats();
    const std::uint64_t size = s.size(), cached = s.num_cached();
    expect(now.inserts == before.inserts + 1 &&
               now.preempted_inserts == before.preempted_inserts + (preempted ? 1 : 0),
           "inserts are counted");
    expect(now.prompt_tokens - before.prompt_tokens == (preempted ? 0 : size) &&
               now.cached_tokens - before.cached_tokens == (preempted ? 0 : cached) &&
               now.pending_tokens - before.pending_tokens == (preempted ? 0 : pending),
           "tokens of new prompts are counted");
    expect(now.preempted_tokens - before.preempted_tokens == (preempted ? size : 0) &&
               now.preempted_cached_tokens - before.preempted_cached_tokens ==
                   (preempted ? cached + pending : 0),
           "tokens of preempted prompts are counted");
    this->tenants_.joined(s.options().name_space.tenant);
  }

  /// The model of a sequence that has just joined, and what its handle must say.
  void joined(Live&& live, Sequence&& s, const InsertOptions& o,
              const typename Tree::Match& found) {
    const std::size_t size = live.known, u = this->unit();
    const std::size_t shared = o.share_pending ? found.cached + found.pending : found.cached;
    if (!o.share_pending) {
      // What repeats another's unwritten tokens is private until it leaves.
      InsertOptions unlimited = o;
      unlimited.max_reuse = size;
      const auto again = tree_->match_prefix(live.tokens, unlimited);
      const bool is_private = found.cached + found.pending > shared - shared % u ||
                              again.cached + again.pending < live.findable;
      if (is_private) {
        live.findable = std::min(live.findable, shared - shared % u);
        count("computed twice rather than waited for");
      }
      live.public_end = std::min(live.public_end, s.options().public_length);
      const std::vector<SimToken> tokens = live.tokens;
      this->set_tokens(live, tokens);
      live.has_joined = true;  // perhaps beside what the cache has
    }
    std::size_t cached = o.share_pending ? found.cached : shared - shared % u;
    std::fill_n(live.done.begin(), cached, 1);
    cached = std::min({cached, o.max_reuse, o.compute_last ? size - 1 : size});
    expect(s.num_cached() == cached, "cached as predicted");
    expect(o.share_pending || s.num_pending() == 0, "who shares nothing pending waits for nobody");
    expect(s.num_scheduled() >= cached, "what is cached is not computed");
    expect(s.num_uncomputed() >= size - std::min(size, o.max_reuse), "max_reuse");
    expect(!o.compute_last || s.num_uncomputed() >= 1, "the last token is computed");
    if (s.num_uncomputed() == 0) count("insert with nothing to compute");
    if (found.cached > 0) count("insert found cached");
    if (found.pending > 0) count("insert found pending");
    if (live.public_end > 0) count("insert with a public prefix");
    this->adopt(std::move(live), std::move(s));
  }

  /// Some more requests wait for admission.
  void push_requests() {
    for (std::size_t n = 1 + below(5); n > 0 && waiting_.size() < 16; --n) {
      std::vector<SimToken> prompt = random_prompt();
      InsertOptions o = random_options(prompt.size());
      o.share_pending = true;
      const std::span<const SimToken> tokens = prompt;  // which stay there when it is moved
      const std::uint64_t id = waiting_.push({tokens, o});
      requests_.emplace(id, Request{std::move(prompt), o});
    }
    if (one_in(3)) {
      const auto gone =
          std::next(requests_.begin(), static_cast<std::ptrdiff_t>(below(requests_.size())));
      waiting_.cancelled(gone->first);
      requests_.erase(gone);
      count("cancelled while it waited");
    }
  }
  /// What is kept of them is what the tree says when it is asked anew.
  void check_ranks() {
    if (one_in(3))
      waiting_.rank(*tree_, {});
    else
      waiting_.rank(*tree_);
    expect(waiting_.ranks().size() == requests_.size(), "as many wait as were told");
    auto request = requests_.begin();
    for (const typename AdmissionQueue<Tree>::Rank& rank : waiting_.ranks()) {
      const auto& [prompt, options, overtaken] = request->second;
      expect(rank.id == request->first, "requests wait in their order");
      const auto match = tree_->match_prefix(prompt, options);
      expect(rank.cached == match.cached && rank.pending == match.pending,
             "a rank is what the tree says");
      expect(rank.chunks == tree_->chunks_needed(prompt, options), "a rank knows the chunks");
      expect(overtaken <= max_overtaken, "nobody is overtaken more often than was said");
      if (rank.cached > 0) count("ranked with a prefix");
      ++request;
    }
  }
  void admit() {
    push_requests();
    this->settle();
    check_ranks();
    const std::size_t headroom = below(12);
    for (bool more = true; more && live_.size() < options_.max_live;) {
      std::optional<std::pair<std::uint64_t, Sequence>> joining;
      if (!this->attempt("admit", [&] { joining = waiting_.admit(*tree_, headroom); })) return;
      more = joining.has_value();
      if (more) {
        expect(tree_->chunks_available() >= headroom, "headroom is left");
        admitted(std::move(*joining));
      } else if (!waiting_.empty() && !had_none_) {
        expect(waiting_.next()->chunks + headroom > tree_->chunks_available(),
               "who fits is admitted");
        count("not admitted");
      }
    }
  }
  void admitted(std::pair<std::uint64_t, Sequence>&& joining) {
    const auto at = requests_.find(joining.first);
    expect(at != requests_.end(), "who is admitted has waited");
    log("admit " + text(joining.first) + " of " + text(requests_.size()));
    for (auto older = requests_.begin(); older != at; ++older) {
      ++older->second.overtaken;
      count("overtaken");
    }
    Live live = model_of(at->second.prompt, at->second.options);
    requests_.erase(at);
    expect(joining.second.size() == live.known, "a request's own prompt is admitted");
    this->tenants_.joined(live.name_space.tenant);
    std::fill_n(live.done.begin(), joining.second.num_cached(), 1);
    this->adopt(std::move(live), std::move(joining.second));
    count("admitted");
  }

  /// A match is at least the longest prefix shared with a live sequence, and without retention no
  /// more; what others have surely written is found written.
  void check_match(const Live& joining, const typename Tree::Match& found) {
    std::size_t longest = 0, written = 0, any = 0;
    for (const LivePtr& other : live_) {
      std::size_t common = 0;
      const std::size_t limit = std::min(other->known, joining.known);
      while (common < limit && other->hash[common] == joining.hash[common]) ++common;
      any = std::max(any, common);
      common = std::min(common, other->findable);
      if (common > found.cached + found.pending) this->look_at(*other);
      common -= common % this->unit();
      longest = std::max(longest, common);
      std::size_t done = 0;
      while (done < common && other->done[done]) ++done;
      written = std::max(written, done);
    }
    std::size_t known = 0;
    while (known < joining.known && remembered_.count(joining.hash[known]) > 0) ++known;
    known -= known % this->unit();
    if (known > 0) count("found again after leaving");
    const std::size_t all = found.cached + found.pending;
    if (found.cached > any) count("found what only the cache has");
    expect(found.cached >= known, "an unbounded cache forgets nothing");
    expect(all <= joining.known, "a match lies within the prompt");
    expect(all >= longest, "what a live sequence has is found");
    expect(found.cached >= written, "what a live sequence has written is found written");
    if (!Retention{}.retains && tree_->stats().leaving_sequences == 0)
      expect(all <= any, "nothing is found that is not there");
  }

  // ---- leave ---------------------------------------------------------------------------------

  void leave() {
    const LivePtr live = this->any_live();
    leave(live, below(8));
  }
  /// \param way  0: on another thread
  void leave(const LivePtr& live, std::size_t way) {
    for (const auto& step : steps_)
      for (const auto& entry : step->entries)
        if (entry.live == live)
          count(step->open ? step->built ? "left a step that was built" : "left an open step"
                           : "left a step in flight");
    for (const auto& step : this->finished_)
      for (const auto& entry : step->entries)
        if (entry.live == live && entry.has_output) count("left before its output was committed");
    if (live->handle.num_pending() > 0) count("left while waiting for another");
    if (live->handle.num_uncomputed() > 0) count("left in the middle of a prefill");
    remember(*live);
    log("leave " + name(*live) + (way == 0 ? " elsewhere" : ""));
    this->forget(live);
    if (way > 0 && way < 4) {
      this->entering();
      this->spare([&] { live->handle.leave(); });
      live->gone = true;
    } else {
      this->drop_handle(Dropped::sequence, live->handle, way == 0, [live] { live->gone = true; });
    }
    if (way > 0 && this->owned_) check_quotas();
    count(way == 0 ? "left on another thread" : "leave");
  }

  /// The policy grants a tenant something else from its next prompt on.
  void change_terms() {
    const std::size_t tenant = below(3);
    this->tenants_.weights[tenant] = 1 + static_cast<std::uint32_t>(below(4));
    this->tenants_.quotas[tenant] = one_in(2) ? max_pool_chunks : below(12);
    log("other terms for tenant " + text(tenant));
    count("other terms for a tenant");
  }
  /// Whenever somebody has left, nobody has more cached than the policy said last.
  void check_quotas() {
    if (!options_.fair || !std::is_same_v<Retention, TenantPolicy>) return;
    std::size_t cached[3] = {};
    const auto& topology = chunkattn::detail::TreeAccess::core(*tree_).topology;
    for (std::size_t i = 1; i < topology.num_indices(); ++i) {
      const auto& n = topology.node(static_cast<std::int32_t>(i));
      if (n.retained && n.pins == 0 && !n.name_space.is_public)
        cached[n.name_space.tenant] += static_cast<std::size_t>(n.length);
    }
    for (std::size_t tenant = 0; tenant < 3; ++tenant) {
      const std::size_t quota = this->tenants_.granted[tenant];
      expect(quota == max_pool_chunks || cached[tenant] <= quota * ChunkSize,
             "a tenant has no more cached than its quota");
      if (quota != max_pool_chunks && cached[tenant] > 0) count("cached within a quota");
    }
  }

  /// What an unbounded cache must still have.
  void remember(const Live& live) {
    if (!Retention{}.retains || options_.budget != max_pool_chunks ||
        options_.retention.high_watermark != max_pool_chunks || live.weights != this->weights_)
      return;
    for (std::size_t p = 0; p < live.findable && live.done[p]; ++p)
      remembered_.insert(live.hash[p]);
    std::size_t end = 0;
    while (end < live.findable && live.done[end]) ++end;
    this->remember_values(live, end);
  }

  // ---- fork ----------------------------------------------------------------------------------

  void fork() {
    const LivePtr live = this->any_live();
    (void)fork(live, one_in(3) ? 1 + below(live->known) : live->known);
  }
  LivePtr fork(const LivePtr& live, std::size_t length) {
    const std::size_t free = tree_->chunks_available();
    const bool in_flight = live->steps > 0;
    std::optional<Sequence> s;
    const bool throws = one_in(2);
    const bool answered = this->attempt("fork", [&] {
      if (!throws) {
        s = live->handle.try_fork(length);
        return;
      }
      try {
        s = live->handle.fork(length);
      } catch (const OutOfChunks&) {
      }
    });
    if (!answered) return nullptr;
    log("fork " + name(*live) + " at " + text(length) + " of " + text(live->known) +
        (s ? " into #" + text(this->last_uid_ + 1) : ", failed"));
    if (!s) {
      expect(free < fork_chunks || had_none_, "a fork takes a short tail's chunks at the most");
      count("fork failed");
      return nullptr;
    }
    this->check_sequence(*live);
    const LivePtr twin = forked(*live, std::move(*s), length);
    if (live->reserved() > 0) count("fork beside outputs to come");
    if (in_flight) count("fork of a sequence in a step");
    count(length == live->known ? "fork" : "fork at an earlier length");
    return twin;
  }

  LivePtr forked(const Live& from, Sequence&& s, std::size_t length) {
    Live twin;
    twin.weights = from.weights;
    twin.name_space = from.name_space;
    twin.priority = from.priority;
    twin.findable = std::min(from.findable, length);
    twin.public_end = s.options().public_length;  // copied tokens are the tenant's own
    const std::size_t public_end = std::min(from.public_end, length);
    expect(twin.public_end == public_end - public_end % this->unit(),
           "what is public of a sequence is public of its fork");
    if (twin.public_end > 0) count("fork of what is public");
    this->set_tokens(twin, std::span(from.tokens).first(length));
    // What is shared or copied is written where the source has written it.
    std::size_t p = 0;
    s.for_each_run({0, static_cast<std::int32_t>(length)}, [&](const Piece& piece) {
      for (std::int32_t i = 0; i < piece.length; ++i, ++p) {
        const Place place{piece.chunk, piece.begin + i};
        const bool same = this->resolve(place) == this->resolve(from.places[p]);
        if (place != from.places[p]) twin.findable = std::min(twin.findable, p);
        twin.done[p] = same && from.done[p] ? 1 : 0;
        if (from.done[p] && p < length - length % this->unit())
          expect(same, "what is computed is not computed again");
      }
    });
    this->inherit(twin, from, 0, length);
    twin.has_joined = true;
    return this->adopt(std::move(twin), std::move(s));
  }

  /// Forks of forks that grow before anything is copied, and leave before the others, in any order.
  void family() {
    std::vector<LivePtr> all{this->any_live()};
    for (std::size_t n = 2 + below(8); n > 0 && live_.size() < options_.max_live; --n) {
      const LivePtr live = all[below(all.size())];
      const std::size_t kind = below(8);
      if (kind < 4) {
        const LivePtr twin = fork(live, live->known);
        if (twin != nullptr) all.push_back(twin);
      } else if (kind < 6) {
        append(live, 1 + below(2 * ChunkSize + 4));
      } else if (all.size() > 1) {
        kind == 6 ? leave(live, 1 + below(7)) : swap_out(live);
        if (!live->handle.is_live()) std::erase(all, live);
      }
    }
    count("family of forks");
  }

  void truncate() {
    const LivePtr live = this->any_live();
    const std::size_t length = one_in(4) ? live->known : 1 + below(live->known);
    const bool nothing = length == live->known && live->reserved() == 0;
    const std::size_t free = tree_->chunks_available();
    Live before = snapshot(*live);
    for (Place& place : before.places) place = this->resolve(place);
    log("truncate " + name(*live) + " to " + text(length) + " of " + text(live->known));
    bool fits = true;
    const bool answered = this->attempt("truncate", [&] {
      try {
        live->handle.truncate(length);
      } catch (const OutOfChunks&) {
        fits = false;
      }
    });
    if (!answered) return;
    if (!fits) {
      expect(free < fork_chunks || had_none_, "truncation takes a short tail's chunks at the most");
      return count("truncate failed");
    }
    if (nothing) return this->check_sequence(*live);
    Sequence handle = std::move(live->handle);
    expect(handle.id() != live->id, "a truncated sequence has a new id");
    this->forget(live);
    // The longer sequence was dropped.
    this->drop_handle(Dropped::sequence, live->handle, false, [live] { live->gone = true; });
    const LivePtr twin = forked(before, std::move(handle), length);
    expect(twin->handle.num_uncomputed() > 0, "the last token is computed again");
    if (before.steps > 0) count("truncated in flight");
    count("truncate");
  }

  /// The model's part, without the handle.
  static Live snapshot(const Live& live) {
    Live copy;
    copy.uid = live.uid;
    copy.tokens = live.tokens;
    copy.hash = live.hash;
    copy.places = live.places;
    copy.done = live.done;
    copy.valued = live.valued;
    copy.known = live.known;
    copy.findable = live.findable;
    copy.public_end = live.public_end;
    copy.weights = live.weights;
    copy.priority = live.priority;
    copy.name_space = live.name_space;
    copy.steps = live.steps;
    return copy;
  }

  // ---- grow, load ----------------------------------------------------------------------------

  void append() {
    const LivePtr live = this->any_live();
    append(live, 1 + below(one_in(4) ? 2 * ChunkSize : 4));
  }
  void append(const LivePtr& live, std::size_t num_tokens) {
    if (live->known > options_.max_length) return;
    std::vector<SimToken> tokens(num_tokens);
    for (auto& token : tokens) token = this->any_token();
    log("append " + text(tokens.size()) + " to " + name(*live));
    const std::size_t needed = live->handle.chunks_needed(tokens.size());
    const std::size_t free = tree_->chunks_available();
    if (live->reserved() > 0) {
      expect_refused([&] { (void)live->handle.try_append(tokens); }, "outputs are to come");
      return count("append refused");
    }
    const std::uint64_t failed = tree_->stats().failed_adds;
    bool fits = false;
    if (!this->attempt("append", [&] { fits = live->handle.try_append(tokens); })) return;
    expect(fits == (needed <= free) || had_none_, "append fails only without chunks");
    expect(tree_->stats().failed_adds == failed + (fits ? 0 : 1), "failed appends are counted");
    if (!fits) return count("append failed");
    expect(free - tree_->chunks_available() <= needed, "chunks as promised");
    for (const SimToken token : tokens) this->push_token(*live, token);
    live->known = live->tokens.size();
    this->check_sequence(*live);
    if (live->steps > 0) count("append under steps in flight");
    count("append");
  }

  /// K/V comes from elsewhere.
  void load() { load(this->any_live()); }
  void load(const LivePtr& live) {
    TokenRange range = live->handle.loadable();
    if (live->steps > 0) {
      expect(range.empty(), "what is in a step is not loaded");
      expect_refused([&] { live->handle.mark_loaded({0, 1}); }, "not while in a step");
      return;
    }
    if (range.empty()) return;
    expect(range.begin >= 0 && range.end() <= static_cast<std::int32_t>(live->known),
           "known tokens are loadable");
    if (range.length > 1 && one_in(8)) {  // a gap: refused within a node
      ++range.begin;
      --range.length;
    }
    if (one_in(2))
      range.length = 1 + static_cast<std::int32_t>(below(static_cast<std::size_t>(range.length)));
    log("load [" + text(range.begin) + ", " + text(range.end()) + ") of " + name(*live));
    for (std::int32_t p = range.begin; p < range.end(); ++p) put_in_place(*live, p);
    try {
      live->handle.mark_loaded(range);
    } catch (const InvalidArgument&) {
      expect(range.begin > live->handle.loadable().begin, "what is loadable can be loaded");
      std::fill_n(live->done.begin() + range.begin, range.length, 0);
      count("load refused");
    }
    this->check_sequence(*live);
    count("load");
  }

  void put_in_place(Live& live, std::int32_t position) {
    const auto p = static_cast<std::size_t>(position);
    const Place place = live.places[p];
    expect(!live.done[p], "what is written is not loaded again");
    expect(this->resolve(place) == place, "nothing is loaded where a copy is to come");
    check_unwritten(place);
    memory_.row(place) = live.hash[p];
    live.done[p] = 1;
  }
  /// No step that may still run writes there.
  void check_unwritten(Place place) {
    for (const auto& step : steps_)
      if (!step->executed && (step->state != Base::State::open || step->built))
        for (const auto& w : step->writes)
          expect(w.place != place, "nothing is loaded where a step may still write");
  }

  void take_over() {
    const LivePtr live = this->any_live();
    const std::size_t pending = live->handle.num_pending();
    std::size_t got = 0;
    this->spare([&] { got = live->handle.take_over(); });
    if (got > 0) log("take over " + text(got) + " by " + name(*live));
    expect(got <= pending && live->handle.num_pending() == pending - got,
           "what it took is its own");
    expect(got == 0 || live->handle.num_uncomputed() >= got, "it computes what it took");
    this->check_sequence(*live);
    if (got > 0) count("take over");
    if (pending > got) count("take over left to a step");
  }

  /// Goes on from the tokens of a sequence whose outputs were given up under later steps, with K/V
  /// from elsewhere: what these steps still write must not be in the way.
  void regenerate() {
    LivePtr from;
    for (const LivePtr& live : live_)
      if (live->superseded > 0 && live->reserved() == 0) from = live;
    if (from == nullptr || live_.size() >= options_.max_live) return take_over();
    std::optional<Sequence> s;
    this->insist("fork", [&] { s = from->handle.try_fork(); });
    if (!s) return count("fork failed");
    log("regenerate " + name(*from) + " as #" + text(this->last_uid_ + 1));
    const LivePtr twin = forked(*from, std::move(*s), from->known);
    const std::vector<SimToken> tokens(1 + below(3), this->any_token());
    if (!twin->handle.try_append(tokens)) return;
    for (const SimToken token : tokens) this->push_token(*twin, token);
    twin->known = twin->tokens.size();
    this->check_sequence(*twin);
    load(twin);
    count("regenerated under later steps");
  }

  // ---- swap ----------------------------------------------------------------------------------

  /// Any of those whose outputs are to come, or any.
  LivePtr any_expecting() {
    LivePtr found = this->any_live();
    if (one_in(2))
      for (const LivePtr& live : live_)
        if (live->reserved() > 0 && (found->reserved() == 0 || one_in(4))) found = live;
    return found;
  }
  void swap_out() { swap_out(any_expecting()); }
  void swap_out(const LivePtr& live) {
    this->settle();
    Swapped swapped;
    swapped.had_work = live->handle.num_uncomputed() > 0 || live->reserved() > 0;
    if (live->reserved() > 0)
      count(live->steps > 0 ? "swap out of a step" : "swap out before an output was committed");
    const bool has_drafts = live->reserved() > 1;
    if (has_drafts) count("swap out before drafts were accepted");
    const std::size_t written = live->handle.num_written();
    const std::size_t shared = std::min(live->handle.num_shared(), written);
    const bool lost_output = live->reserved() > 0;
    remember(*live);
    ShadowCache cache{&memory_};
    log("swap out " + name(*live));
    if (!this->attempt("swap_out", [&] {
          swapped.data = chunkattn::swap_out(live->handle, cache, this->columns());
        }))
      return;
    swapped.model = snapshot(*live);
    this->forget(live);
    live->gone = true;
    this->cut(swapped.model, swapped.model.known);
    expect(swapped.data.written == written && swapped.data.tokens == swapped.model.tokens,
           "all of it is swapped out");
    expect(swapped.data.shared == shared &&
               swapped.data.kv.size() == chunkattn::kv_bytes(cache, written - shared),
           "what other live sequences have is not copied");
    expect(swapped.data.options.compute_last || !lost_output,
           "the output that was to come is computed after resume()");
    if (swapped_.size() < 6) swapped_.push_back(std::move(swapped));
    count("swap out");
  }

  void resume() {
    if (swapped_.empty()) return;
    std::swap(swapped_[below(swapped_.size())], swapped_.back());
    Swapped& swapped = swapped_.back();
    ShadowCache cache{&memory_};
    this->settle();
    const std::size_t needed = tree_->chunks_needed(swapped.data.tokens, swapped.data.options);
    const std::size_t free = tree_->chunks_available();
    const auto found = tree_->match_prefix(swapped.data.tokens, swapped.data.options);
    const TreeStats before = tree_->stats();
    std::optional<Sequence> s;
    if (!this->attempt(
            "resume", [&] { s = chunkattn::resume(*tree_, cache, swapped.data, this->columns()); }))
      return;
    log("resume " + text(swapped.data.written) + " of " + text(swapped.data.tokens.size()) +
        (s ? " as #" + text(this->last_uid_ + 1) : ", failed"));
    expect(s.has_value() == (needed <= free) || had_none_, "resume needs what chunks_needed says");
    if (!s) return count("resume failed");
    check_counted(before, *s, true, found.pending);
    Live live;
    live.weights = this->weights_;
    live.name_space = swapped.model.name_space;
    live.priority = swapped.model.priority;
    live.public_end = swapped.model.public_end;
    this->set_tokens(live, swapped.model.tokens);
    live.findable = live.known - live.known % this->unit();
    const std::size_t written = s->num_written();
    const bool outdated = swapped.model.weights != this->weights_;
    if (!outdated && written >= swapped.data.shared)
      this->inherit(live, swapped.model, swapped.data.shared,
                    std::min(written, swapped.data.written));
    if (outdated) count("resume after clear");
    const bool lost = found.cached < swapped.data.shared;  // by those that had it, too
    if (lost) count("resume without what was shared");
    if (s->num_pending() == 0) {
      const std::size_t loaded =
          outdated || lost ? 0
                           : std::min(swapped.data.written,
                                      live.known - (swapped.data.options.compute_last ? 1 : 0));
      const bool copies = !chunkattn::detail::TreeAccess::core(*tree_).pending_copies.empty();
      expect(written >= loaded || copies, "K/V is back in place");
      std::fill_n(live.done.begin(), std::max(loaded, found.cached), 1);
      // Where others were still to write above what is written, computing goes back to that.
      if (!swapped.data.options.compute_last && written == live.known && found.pending == 0)
        expect(s->num_uncomputed() == 0, "nothing is computed again");
      count("resume");
    } else {
      std::fill_n(live.done.begin(), found.cached, 1);
      count("resume beside a step that writes the same");
    }
    if (swapped.had_work)
      expect(s->num_uncomputed() > 0, "what was to compute still is, or an output is to come");
    swapped_.pop_back();
    this->adopt(std::move(live), std::move(*s));
  }

  std::vector<Swapped> swapped_;
  std::vector<Pinned> pins_;
  static constexpr std::size_t max_overtaken = 3;
  AdmissionQueue<Tree> waiting_{max_overtaken};
  std::map<std::uint64_t, Request> requests_;  // that wait, by id
};

}  // namespace test
