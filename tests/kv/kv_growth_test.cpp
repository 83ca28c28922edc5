// Growth of a KvCache where memory runs out, and what views that were taken before it still see.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "chunkattn/detail/kv/write_check.hpp"
#include "chunkattn/kv_cache.hpp"
#include "support/counted_new.hpp"

using namespace chunkattn;

namespace {

// A chunk of one layer is as large as a slab should be: each has one to itself.
constexpr KvCacheOptions large{.num_layers = 3, .num_kv_heads = 64, .head_dim = 256};
constexpr int large_chunk = 128;

template <class T>
void check_addresses(KvCache<Cpu, T>& cache) {
  const auto last = static_cast<ChunkIndex>(cache.num_chunks()) - 1;
  for (int l = 0; l < cache.options().num_layers; ++l) {
    const KvView<T> view = cache.layer(l);
    REQUIRE(view.num_chunks == last + 1);
    for (ChunkIndex s = 0; s <= last; ++s) {
      REQUIRE(view.k_slabs[s >> view.slab_shift] != nullptr);
      REQUIRE(view.v_slabs[s >> view.slab_shift] != nullptr);
      if constexpr (has_row_scales<T>) {
        REQUIRE(view.k_scale_slabs[s >> view.slab_shift] != nullptr);
        REQUIRE(view.v_scale_slabs[s >> view.slab_shift] != nullptr);
      }
    }
  }
}

}  // namespace

#if CHUNKATTN_EXCEPTIONS
TEST_CASE_TEMPLATE("growth that fails at any allocation gives no layer memory, and none later", T,
                   half, std::int8_t) {
  for (const bool from_empty : {true, false}) {
    for (int allocation = 0;; ++allocation) {
      KvCache<Cpu, T> cache(large_chunk, large, from_empty ? 0 : 2);
      const std::size_t chunks = cache.num_chunks(), bytes = cache.bytes();
      const auto outstanding = test::heap.outstanding;
      test::heap.failures = 0;
      test::heap.fail_in = allocation;
      bool failed = false;
      try {
        cache.grow(5);
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      test::heap.fail_in = -1;
      if (failed) {
        REQUIRE(test::heap.failures == 1);
        CHECK(cache.num_chunks() == chunks);
        CHECK(cache.bytes() == bytes);
        CHECK(test::heap.outstanding <= outstanding + 32);  // tables of addresses at most
        check_addresses(cache);
        cache.grow(3);  // less than what failed
        check_addresses(cache);
      }
      cache.grow(20);  // beyond what the first tables hold, too
      CHECK(cache.bytes() == 20 * cache.bytes_per_chunk());
      check_addresses(cache);
      if (!failed) {
        CHECK(allocation > 6);
        break;
      }
    }
  }
}
#endif

TEST_CASE_TEMPLATE("views from before many growths find their chunks where they were", T, half,
                   std::int8_t) {
  KvCache<Cpu, T> cache(large_chunk, large, 1);
  std::vector<KvView<T>> views;
  for (std::size_t chunks = 1; chunks <= 60; ++chunks) {
    cache.grow(chunks);
    views.push_back(cache.layer(2));
  }
  for (const KvView<T>& view : views) {
    for (ChunkIndex s = 0; s < view.num_chunks; ++s) {
      REQUIRE(view.k_row(s, 1, 3) == views.back().k_row(s, 1, 3));
      REQUIRE(view.v_row(s, 1, 3) == views.back().v_row(s, 1, 3));
      if constexpr (has_row_scales<T>) {
        REQUIRE(view.k_row_scale(s, 1, 3) == views.back().k_row_scale(s, 1, 3));
        REQUIRE(view.v_row_scale(s, 1, 3) == views.back().v_row_scale(s, 1, 3));
      }
    }
  }
}

TEST_CASE("check_writes keeps nothing of steps that have ended") {
  detail::WriteCheck check(2, 3, /*id=*/7);
  const auto run = [&](std::uint64_t first) {
    for (std::uint64_t step = first; step < first + 100; ++step) {
      check.on_built(step, /*writes=*/true, 7);
      if (step % 2 == 0) {
        for (const int layer : {0, 1}) check.wrote(step, layer, 0, 3);
        check.on_finish(step);
      }
      check.on_ended(step);
    }
  };
  run(1);
  const auto before = test::heap.outstanding;
  run(1000);
  CHECK(test::heap.outstanding == before);
}
