// Values of tokens in the engine simulation: two columns, one of which depends on the next token,
// too. A value is the hash of the path that it depends on, so that one of another path is noticed.
// What a sequence has once it keeps, and so do those that share it or are forked from it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/cache/annotations.hpp"
#include "tests/support/engine_sim_steps.hpp"

namespace test {

template <class Retention, int ChunkSize>
class EngineSimValues : public EngineSimSteps<Retention, ChunkSize> {
  using Base = EngineSimSteps<Retention, ChunkSize>;

 public:
  EngineSimValues(Choices& choices, const SimOptions& options, Counters& counters)
      : Base(choices, options, counters) {
    if (!one_in(3)) make_columns();
  }

 protected:
  using Base::below, Base::one_in, Base::count, Base::expect, Base::expect_refused, Base::log;
  using Base::text, Base::name, Base::tree_, Base::live_, Base::memory_, Base::finished_;
  using typename Base::Entry, typename Base::SimStep, typename Base::Live, typename Base::LivePtr;
  using typename Base::Sequence, typename Base::Tree;

  /// A hash in 12 bytes.
  using Wide = std::array<std::uint32_t, 3>;
  using Own = Annotations<Tree, std::uint64_t>;
  using Next = Annotations<Tree, Wide>;

  [[nodiscard]] chunkattn::KvCompanions<Sequence> columns() {
    if (!own_) return {};
    return {&*own_, &*next_};
  }
  /// Something is done with values.
  void annotate(const std::vector<SimToken>& prompt, const Live& model, const InsertOptions& o) {
    if (!own_) return;
    if (one_in(80)) {  // columns of a tree that has nodes
      make_columns();
      for (const LivePtr& live : live_) forget_values(*live);
      this->remembered_values_ = {};
      count("columns from now on");
    }
    if (one_in(2)) {
      one_in(2) ? annotate(*own_, prompt, model, o) : annotate(*next_, prompt, model, o);
      return;
    }
    if (finished_.empty()) return;
    const SimStep& step = *finished_[below(finished_.size())];
    one_in(2) ? set_rows(*own_, step) : set_rows(*next_, step);
  }
  /// What a sequence has that came from another one: at a fork, or after it was swapped out.
  void inherit(Live& live, const Live& from, std::size_t begin, std::size_t end) {
    if (heap.failures != failures_) return;  // memory was short: values may have been lost
    for (std::size_t k = 0; k < from.valued.size(); ++k)
      for (std::size_t i = begin; i < std::min(end, from.valued[k].size()); ++i)
        if (live.hash[i] == from.hash[i]) live.valued[k][i] |= from.valued[k][i];
  }
  /// What an unbounded cache must still have.
  void remember_values(const Live& live, std::size_t end) {
    for (std::size_t k = 0; k < live.valued.size(); ++k)
      for (std::size_t i = 0; i < end - end % this->unit(); ++i)
        if (live.valued[k][i]) this->remembered_values_[k].insert(key_of(live, i));
  }
  void check_values(Live& live) final {
    if (!own_) return;
    if (!live.has_joined) expect_shared(live);
    live.has_joined = true;
    check_column(*own_, live);
    check_column(*next_, live);
  }
  /// An operation begins.
  void begin_values() { failures_ = heap.failures; }
  void check_no_values() const {
    if (own_) expect(own_->stats().chunks + next_->stats().bytes == 0, "no value is left");
  }
  void check_orphans() {
    if (!own_) return;
    expect_refused([&] { (void)own_->first_missing(std::vector<SimToken>(1)); }, "of a dead tree");
    for (const auto& step : finished_)
      expect_refused([&] { next_->set(*step->finished, {}); }, "of a dead tree");
  }

 private:
  static std::uint64_t value_of(const Own&, std::uint64_t hash) { return hash; }
  static Wide value_of(const Next&, std::uint64_t hash) {
    const auto low = static_cast<std::uint32_t>(hash),
               high = static_cast<std::uint32_t>(hash >> 32);
    return {low, high, low ^ high};
  }
  template <class Column>
  using ValueOf = typename Column::value_type;
  template <class Column>
  static constexpr std::size_t index_of = std::is_same_v<Column, Own> ? 0 : 1;

  void make_columns() {
    this->sink_allocates_ = true;  // so does a merge
    next_.reset();
    own_.emplace(*tree_);
    next_.emplace(*tree_, typename Next::Options{.lag = 1, .name = "next"});
  }
  static void forget_values(Live& live) {
    for (auto& valued : live.valued) std::fill(valued.begin(), valued.end(), std::uint8_t{0});
  }

  // Of a token that is shared with all of its unit.
  [[nodiscard]] std::uint64_t key_of(const Live& live, std::size_t i) const {
    return live.hash[i] + 31 * live.hash[i - i % this->unit() + this->unit() - 1];
  }
  // A new sequence has the values of slots that others have, and those of what the cache kept.
  void expect_shared(Live& live) {
    std::size_t cached = 0;
    while (cached < live.known && this->remembered_.count(live.hash[cached]) > 0) ++cached;
    cached -= cached % this->unit();
    for (std::size_t k = 0; k < live.valued.size(); ++k) {
      for (const LivePtr& other : live_)
        for (std::size_t i = 0; i < std::min(live.known, other->known); ++i)
          if (i < other->places.size() && other->places[i] == live.places[i])
            live.valued[k][i] |= other->valued[k][i];
      for (std::size_t i = 0; i < cached; ++i)
        if (this->remembered_values_[k].count(key_of(live, i)) > 0) {
          live.valued[k][i] = 1;
          count("value found again after leaving");
        }
    }
  }
  /// All that the column says of a sequence is of its path; what was there is there.
  template <class Column>
  void check_column(const Column& column, Live& live) {
    const std::size_t lag = column.options().lag;
    std::vector<std::uint8_t>& valued = live.valued[index_of<Column>];
    const std::size_t end = live.known - std::min(live.known, lag);
    std::vector<std::uint8_t> there(valued.size());
    for (std::size_t p = 0; p < end;) {
      const std::size_t missing = column.first_missing(live.handle, p);
      expect(missing >= p && missing <= end, "values are of known tokens");
      check_values_of(column, live, p, missing, live.handle);
      for (; p < missing; ++p) there[p + lag] = 1;
      ++p;
    }
    for (std::size_t i = 0; i < valued.size(); ++i) {
      if (valued[i] && !there[i])
        log("no value at slot " + text(i) + " of " + name(live) + ", column " +
            text(index_of<Column>));
      expect(!valued[i] || there[i] || i >= live.known, "a value stays as long as its sequence");
    }
    valued = std::move(there);
  }
  /// Those of [begin, end), read from a sequence or a prompt.
  template <class Column, class Where, class... Options>
  void check_values_of(const Column& column, const Live& path, std::size_t begin, std::size_t end,
                       const Where& where, const Options&... options) {
    std::vector<ValueOf<Column>> values(end - begin);
    column.read(where, begin, values, options...);
    for (std::size_t p = begin; p < end; ++p)
      expect(values[p - begin] == value_of(column, path.hash[p + column.options().lag]),
             "a value is of the path that it depends on");
  }

  template <class Column>
  void annotate(Column& column, const std::vector<SimToken>& prompt, const Live& model,
                const InsertOptions& o) {
    switch (below(4)) {
      case 0:
        return look(column, prompt, model, o);
      default:
        if (!live_.empty()) set(column, *this->any_live());
    }
  }
  template <class Column>
  void set(Column& column, Live& live) {
    const std::size_t lag = column.options().lag;
    const auto& core = chunkattn::detail::TreeAccess::core(*tree_);
    const auto index = chunkattn::detail::TreeAccess::index(live.handle);
    const auto written =
        static_cast<std::size_t>(core.topology.written_end(core.sequences[index].tail));
    const std::size_t end = std::min({written, live.known, live.known - std::min(live.known, lag)});
    std::size_t begin = below(live.known + 1), length = below(live.known + 1 - begin);
    if (one_in(2)) length = std::min<std::size_t>(length, 2);
    if (begin + length > end && !one_in(6)) {
      begin = std::min(begin, end);
      length = std::min(length, end - begin);
    }
    std::vector<ValueOf<Column>> values(length, value_of(column, 1));
    for (std::size_t i = 0; i < length && begin + i + lag < live.known; ++i)
      values[i] = value_of(column, live.hash[begin + i + lag]);
    if (begin + length > end) {
      expect_refused([&] { column.set(live.handle, begin, values); }, "no row, or no token yet");
      return count("values refused");
    }
    for (std::size_t p = begin; p < begin + length; ++p)
      expect(memory_.row(this->resolve(live.places[p])) == live.hash[p],
             "the row of a value was computed");
    log("set values [" + text(begin) + ", " + text(begin + length) + ") of " + name(live));
    this->insist("set values", [&] { column.set(live.handle, begin, values); });
    for (std::size_t p = begin; p < begin + length; ++p) live.valued[index_of<Column>][p + lag] = 1;
    share(live, index_of<Column>);
    this->check_sequence(live);
    count("values set");
  }
  /// Who has the same slots has the same values.
  void share(const Live& live, std::size_t k) {
    for (const LivePtr& other : live_)
      for (std::size_t i = 0; i < std::min(live.known, other->known); ++i)
        if (live.valued[k][i] && i < other->places.size() && other->places[i] == live.places[i])
          other->valued[k][i] = 1;
  }
  template <class Column>
  void set_rows(Column& column, const SimStep& step) {
    const std::size_t lag = column.options().lag;
    std::vector<ValueOf<Column>> values(static_cast<std::size_t>(step.num_rows),
                                        value_of(column, 2));
    std::size_t expected = 0, possible = 0;
    for (const Entry& entry : step.entries) {
      const Live& live = *entry.live;
      if (live.gone) continue;
      for (std::size_t i = 0; i < entry.rows.size(); ++i) {
        const std::size_t p = static_cast<std::size_t>(entry.begin) + i;
        if (p + lag >= live.known || entry.rows[i] != live.hash[p]) continue;
        values[static_cast<std::size_t>(entry.first_row) + i] =
            value_of(column, live.hash[p + lag]);
        ++possible;
        expected += entry.superseded() ? 0 : 1;
      }
    }
    std::size_t set = 0;
    this->insist("set values of a step", [&] { set = column.set(*step.finished, values); });
    log("set " + text(set) + " values of step " + text(step.number));
    expect(set >= expected && set <= possible, "values of rows that count, and of no other");
    for (const Entry& entry : step.entries) {
      Live& live = *entry.live;
      if (live.gone || entry.superseded()) continue;
      for (std::size_t i = 0; i < entry.rows.size(); ++i)
        if (const std::size_t last = static_cast<std::size_t>(entry.begin) + i + lag;
            last < live.known)
          live.valued[index_of<Column>][last] = 1;
      if (!live.handle.is_live()) continue;  // dropped on another thread
      share(live, index_of<Column>);
      this->check_sequence(live);
    }
    if (set > 0) count("values of a step set");
    if (set < values.size()) count("values of a step left out");
  }
  /// A prompt finds the values of the path that it shares.
  template <class Column>
  void look(Column& column, const std::vector<SimToken>& prompt, const Live& model,
            const InsertOptions& o) {
    const std::size_t lag = column.options().lag, begin = below(prompt.size() + 1);
    const std::size_t end = column.first_missing(prompt, begin, o);
    expect(end >= begin && (end == begin || end + lag <= prompt.size()), "within the prompt");
    check_values_of(column, model, begin, end, prompt, o);
    for (const LivePtr& other : live_) {
      std::size_t common = 0;
      const std::size_t limit = std::min({other->known, other->findable, model.known});
      while (common < limit && other->hash[common] == model.hash[common]) ++common;
      common -= common % this->unit();
      std::size_t p = begin;
      while (p + lag < common && other->valued[index_of<Column>][p + lag]) ++p;
      expect(end >= p, "a prompt finds the values of those whose tokens it finds");
    }
    std::vector<ValueOf<Column>> more(end - begin + 1);
    expect_refused([&] { column.read(prompt, begin, more, o); },
                   "no value is read that is not there");
    count(end > begin ? "prompt with values" : "prompt without values");
  }

  std::optional<Own> own_;
  std::optional<Next> next_;
  std::uint64_t failures_ = 0;  // of memory, until this operation
};

}  // namespace test
