// Where K/V rows lie along a path: what the threads that fill the tables of a tile walk.
#pragma once

#include "device_plan.hpp"
#include "ptx.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// Walks the pieces of a path: where is the K/V row of a position?
class PieceCursor {
 public:
  CHUNKATTN_DEVICE explicit PieceCursor(const PlanMemory& plan) : plan_(plan) {}

  /// Goes to the begin of the path that ends with `segment`.
  CHUNKATTN_DEVICE void restart(int segment) {
    deepest_ = segment;
    piece_ = {0, 0, 0, 0};
    segment_end_ = 0;
  }

  /// The piece that holds `position`, which lies on the path and never goes back.
  CHUNKATTN_DEVICE const Piece& seek(int position) {
    if (position < piece_.position + piece_.length) return piece_;
    if (position >= segment_end_) {
      enter_segment(position);
    } else {  // mostly the very next one
      read_piece(++index_);
      if (position < piece_.position + piece_.length) return piece_;
    }
    int high = last_;  // ends beyond `position`
    while (index_ < high) {
      const int middle = (index_ + high) / 2;
      const Piece& piece = plan_.pieces[middle];
      if (position >= piece.position + piece.length)
        index_ = middle + 1;
      else
        high = middle;
    }
    read_piece(index_);
    return piece_;
  }

 private:
  // All of it by one load: it begins at a multiple of its 16 bytes.
  CHUNKATTN_DEVICE void read_piece(int index) {
    struct alignas(16) Words {
      std::int32_t of[4];
    };
    static_assert(sizeof(Words) == sizeof(Piece));
    const Words words = *reinterpret_cast<const Words*>(plan_.pieces + index);
    piece_ = {words.of[0], words.of[1], words.of[2], words.of[3]};
  }

  // From the deepest segment up: paths are short, and this happens once per segment.
  CHUNKATTN_DEVICE void enter_segment(int position) {
    const Segment* segment = &plan_.segments[deepest_];
    while (position < segment->position) segment = &plan_.segments[segment->parent];
    segment_end_ = segment->position + segment->length;
    index_ = segment->piece_begin;
    last_ = index_ + segment->num_pieces - 1;
  }

  const PlanMemory& plan_;
  int deepest_ = -1;
  Piece piece_{0, 0, 0, 0};
  int segment_end_ = 0;
  int index_ = 0;
  int last_ = 0;
};

template <class T>
struct TokenRows {
  const T* k;
  const T* v;  ///< null: nothing to read, zeros
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
