// One evaluation of a graph is told from the next, because masks stay as they are within one, while
// the next has other values at the same addresses.
//
// ggml does not say where one begins. Its scheduler numbers the parts of a graph in the order in
// which it computes them, so a number that is not above the last one is of another evaluation;
// before a new graph, with higher numbers, it asks of each node whether we compute it. A part that
// no scheduler has numbered says nothing, and is an evaluation of its own.
#pragma once

#include <cstdint>

namespace plugin {

/// The evaluations of the graphs of one backend.
class Evaluations {
 public:
  /// Before a part of a graph is computed.
  /// \param part    the scheduler's number of it; 0: none
  /// \param graphs  changes whenever a graph may have been made
  /// \returns whether another evaluation may have begun
  bool begins(std::uint64_t part, std::uint64_t graphs) noexcept {
    const bool same = part > part_ && part_ != 0 && graphs == graphs_;
    part_ = part;
    graphs_ = graphs;
    return !same;
  }

 private:
  std::uint64_t part_ = 0;  // the last
  std::uint64_t graphs_ = 0;
};

}  // namespace plugin
