#include "ptx/run.hpp"

#include <algorithm>
#include <climits>
#include <memory>
#include <random>

#include "ptx/allocations.hpp"
#include "ptx/counts.hpp"
#include "ptx/forms.hpp"

namespace ptxrun {

Statistics& statistics() {
  static Statistics counts{0, 0, 0, std::vector<u64>(static_cast<std::size_t>(num_forms()))};
  return counts;
}

namespace {

constexpr int most_resident = 4, most_idle = 1000;

enum class Stop { barrier, turn_over, gave_turn, done };

std::string place(const Warp& w, const Instruction& i) {
  return i.form->name + " (line " + std::to_string(i.line) + ", block " +
         std::to_string(w.block->index) + ", warp " + std::to_string(w.index) + ")";
}

/// A warp on its way to a barrier, to its end or to the end of its turn. Lanes have program
/// counters of their own. Those that are furthest behind go on, so lanes meet again; at what is for
/// all lanes they wait for the others.
class Turn {
 public:
  Turn(Warp& warp, u64 budget) : w_(warp), code_(warp.block->entry.code), budget_(budget) {}

  Stop run() {
    for (;;) {
      if (!choose_group()) return Stop::done;
      for (bool same_group = true; same_group;) {
        const Instruction& i = code_[static_cast<std::size_t>(pc_)];
        if (budget_-- == 0) {
          leave_group_at(pc_);
          return Stop::turn_over;
        }
        same_group = step(i);
        if (stop_) return *std::exchange(stop_, nullptr);
        if (same_group && pc_ >= limit_) {  // others are here or further behind
          leave_group_at(pc_);
          same_group = false;
        }
      }
    }
  }

 private:
  // False: all lanes have left.
  bool choose_group() {
    u32 ready = ~w_.exited & ~w_.parked;
    if (ready == 0) {
      if (w_.exited == all_lanes) return false;
      meet();
      ready = all_lanes;
    }
    pc_ = limit_ = INT_MAX;
    group_ = 0;
    for_lanes(ready, [&](int l) {
      const int p = w_.pc[static_cast<std::size_t>(l)];
      if (p < pc_) {
        limit_ = std::exchange(pc_, p);
        group_ = 0;
      }
      if (p == pc_)
        group_ |= u32{1} << l;
      else
        limit_ = std::min(limit_, p);
    });
    return true;
  }

  // All lanes that have not left wait for others: at one place, or for ever.
  void meet() {
    const Instruction& first = code_[static_cast<std::size_t>(
        w_.pc[static_cast<std::size_t>(std::countr_zero(w_.parked))])];
    if (w_.exited != 0) throw Fault("lanes are off, which have left: " + place(w_, first));
    for (const int pc : w_.pc)
      if (pc != w_.pc[0])
        throw Fault("lanes are off, which wait at line " +
                    std::to_string(code_[static_cast<std::size_t>(pc)].line) + ": " +
                    place(w_, first));
    w_.parked = 0;
  }

  void leave_group_at(int pc) {
    for_lanes(group_, [&](int l) { w_.pc[static_cast<std::size_t>(l)] = pc; });
  }

  bool end_turn(Stop why) {
    static constexpr Stop all[] = {Stop::barrier, Stop::turn_over, Stop::gave_turn, Stop::done};
    stop_ = &all[static_cast<int>(why)];
    return false;
  }

  // False: lanes go different ways, wait or have left.
  bool step(const Instruction& i) {
    u32 on = group_;
    if (i.guard >= 0) {
      const u32 p = w_.predicates[static_cast<std::size_t>(i.guard)];
      on &= i.negated ? ~p : p;
    }
    ++statistics().instructions;
    if (on != 0) ++statistics().by_form[static_cast<std::size_t>(i.form->number)];
    // What waits for all lanes is counted when they are there.
    if (i.flow != Flow::together && i.flow != Flow::barrier) count(w_, i, on);
    if (i.flow == Flow::branch) return branch(i, on);
    if (on == 0) return ++pc_, true;
    switch (i.flow) {
      case Flow::plain:
        execute(i, on);
        return true;
      case Flow::leave:
        leave(on);
        return false;
      case Flow::give_turn:
        leave_group_at(pc_ + 1);
        return end_turn(Stop::gave_turn);
      default:
        break;
    }
    if (on != group_) throw Fault("lanes are off by a predicate: " + place(w_, i));
    if (group_ != all_lanes) {  // the others are to come here
      leave_group_at(pc_);
      w_.parked |= group_;
      return false;
    }
    count(w_, i, on);
    if (i.flow == Flow::barrier) {
      leave_group_at(pc_ + 1);
      w_.barrier_line = i.line;
      return end_turn(Stop::barrier);
    }
    ++w_.meetings;
    execute(i, all_lanes);
    ++w_.meetings;
    return true;
  }

  void execute(const Instruction& i, u32 on) {
    w_.mask = on;
    try {
      i.run(w_, i);
    } catch (const Fault& fault) {
      throw Fault(std::string(fault.what()) + ": " + place(w_, i));
    }
    ++pc_;
  }

  bool branch(const Instruction& i, u32 on) {
    if (on == group_ || on == 0) {
      const int from = std::exchange(pc_, on == 0 ? pc_ + 1 : i.target);
      return pc_ > from || limit_ == INT_MAX || pc_ < limit_;
    }
    for_lanes(group_, [&](int l) {
      w_.pc[static_cast<std::size_t>(l)] = (on >> l & 1) != 0 ? i.target : pc_ + 1;
    });
    return false;
  }

  void leave(u32 on) {
    for_lanes(on, [&](int lane) {
      const auto l = static_cast<std::size_t>(lane);
      const auto has_copies = [](const auto& group) { return !group.empty(); };
      if (!w_.open[l].empty() || std::any_of(w_.groups[l].begin(), w_.groups[l].end(), has_copies))
        throw Fault("a thread leaves with copies under way: block " +
                    std::to_string(w_.block->index) + ", thread " +
                    std::to_string(w_.thread(lane).number));
      w_.groups[l].clear();
    });
    leave_group_at(pc_ + 1);
    w_.exited |= on;
  }

  Warp& w_;
  const std::vector<Instruction>& code_;
  u64 budget_;
  int pc_ = 0, limit_ = 0;  // of the group; where others are
  u32 group_ = 0;
  const Stop* stop_ = nullptr;
};

/// A block's warps until none can go on.
class BlockRun {
 public:
  enum class Outcome { moved, waits, done };

  BlockRun(const Entry& entry, const Launch& launch, int index)
      : block_(entry, index, launch.grid, launch.threads, launch.shared_bytes) {
    block_.params = static_cast<const unsigned char*>(launch.params);
  }

  Outcome turn(std::mt19937_64& random) {
    std::vector<Warp*> order;
    for (Warp& w : block_.warps)
      if (!w.at_barrier && w.exited != all_lanes) order.push_back(&w);
    std::shuffle(order.begin(), order.end(), random);
    bool gave_turn = true;
    for (Warp* w : order) {
      const u64 budget = random() % 2 == 0 ? ~u64{0} : random() % 2000 + 1;
      const Stop stop = Turn(*w, budget).run();
      w->at_barrier = stop == Stop::barrier;
      gave_turn = gave_turn && stop == Stop::gave_turn;
    }
    if (pass_barrier()) return Outcome::moved;
    const auto has_left = [](const Warp& w) { return w.exited == all_lanes; };
    if (std::all_of(block_.warps.begin(), block_.warps.end(), has_left)) return Outcome::done;
    return gave_turn ? Outcome::waits : Outcome::moved;
  }

 private:
  bool pass_barrier() {
    const Warp& first = block_.warps[0];
    std::size_t waiting = 0, left = 0;
    for (const Warp& w : block_.warps) {
      waiting += w.at_barrier ? 1 : 0;
      left += w.exited == all_lanes ? 1 : 0;
    }
    if (waiting == 0 || waiting + left < block_.warps.size()) return false;
    if (left > 0)
      throw Fault("some warps wait at a barrier, others have left: block " +
                  std::to_string(block_.index));
    for (Warp& w : block_.warps) {
      if (w.barrier_line != first.barrier_line)
        throw Fault("warps at different barriers: lines " + std::to_string(first.barrier_line) +
                    " and " + std::to_string(w.barrier_line) + ", block " +
                    std::to_string(block_.index));
      w.at_barrier = false;
    }
    block_.shared.passed_barrier();
    return true;
  }

  Block block_;
};

// Register files of blocks that are over. What they hold is what a device's would: anything.
std::vector<std::vector<u32>>& spare_registers() {
  static std::vector<std::vector<u32>> spare;
  return spare;
}

}  // namespace

Block::Block(const Entry& of, int number, int size, int num_threads, std::size_t shared_bytes)
    : entry(of),
      index(number),
      grid(size),
      threads(num_threads),
      shared(shared_bytes),
      warps(static_cast<std::size_t>(num_threads / 32)) {
  for (std::size_t n = 0; n < warps.size(); ++n) {
    Warp& w = warps[n];
    w.block = this;
    w.index = static_cast<int>(n);
    if (!spare_registers().empty()) {
      w.registers = std::move(spare_registers().back());
      spare_registers().pop_back();
    }
    const std::size_t words = std::size_t{entry.num_slots} * 32;
    if (w.registers.size() < words) w.registers.resize(words, 0x7fc0dead);
    w.predicates.assign(entry.num_predicates, 0x5a5a5a5a);
    for (const u32 p : entry.false_predicates) w.predicates[p] = 0;
    for (const u32 p : entry.true_predicates) w.predicates[p] = all_lanes;
    for (const Literal& literal : entry.literals)
      for (int l = 0; l < 32; ++l) {
        if (literal.wide)
          w.reg<u64>(literal.slot)[l] = literal.value;
        else
          w.reg<u32>(literal.slot)[l] = static_cast<u32>(literal.value);
      }
    const u32 values[num_specials] = {static_cast<u32>(n) * 32, static_cast<u32>(index),
                                      static_cast<u32>(threads), static_cast<u32>(grid)};
    for (int s = 0; s < num_specials; ++s)
      for (int l = 0; l < 32 && entry.special_slot[static_cast<std::size_t>(s)] >= 0; ++l)
        w.reg<u32>(static_cast<u32>(entry.special_slot[static_cast<std::size_t>(s)]))[l] =
            values[s] + (s == tid_x ? static_cast<u32>(l) : 0);
  }
}

Block::~Block() {
  for (Warp& w : warps) spare_registers().push_back(std::move(w.registers));
}

void run(const Entry& entry, const Launch& launch) {
  if (launch.param_bytes != entry.param_bytes)
    throw Fault(entry.name + ": arguments of " + std::to_string(launch.param_bytes) +
                " bytes, not " + std::to_string(entry.param_bytes));
  if (launch.grid < 1 || launch.threads < 32 || launch.threads > 1024 || launch.threads % 32 != 0)
    throw Fault(entry.name + ": a launch that no device takes");
  ++statistics().launches;
  begin_launch();
  std::mt19937_64 random(launch.seed);
  const std::size_t resident = random() % most_resident + 1;
  std::vector<std::unique_ptr<BlockRun>> running;
  int next = 0, idle = 0;
  while (next < launch.grid || !running.empty()) {
    while (next < launch.grid && running.size() < resident)
      running.push_back(std::make_unique<BlockRun>(entry, launch, next++));
    const auto which = running.begin() + static_cast<std::ptrdiff_t>(random() % running.size());
    const BlockRun::Outcome outcome = (*which)->turn(random);
    if (outcome == BlockRun::Outcome::done) running.erase(which);
    idle = outcome == BlockRun::Outcome::waits ? idle + 1 : 0;
    if (idle > most_idle) throw Fault(entry.name + ": blocks wait for one another");
  }
}

}  // namespace ptxrun
