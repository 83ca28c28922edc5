// The emulator itself: does it notice what it is there to notice?
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "simt/emulator.hpp"

namespace {

namespace ptx = chunkattn::detail::ptx;
using chunkattn::half;

void schedule(simt::Order order, simt::Copies copies = simt::Copies::at_issue) {
  simt::current_schedule() = {order, copies, 7};
}

// Each thread writes its index, then reads its neighbour's from the other end of the block.
std::vector<int> exchange(bool with_barrier) {
  std::vector<int> out(128, -1);
  simt::launch(1, 128, 128 * sizeof(int), [&] {
    int* shared = reinterpret_cast<int*>(ptx::dynamic_shared());
    shared[ptx::thread_index()] = ptx::thread_index();
    if (with_barrier) ptx::barrier();
    out[static_cast<std::size_t>(ptx::thread_index())] = shared[127 - ptx::thread_index()];
  });
  return out;
}

}  // namespace

TEST_CASE("a missing barrier shows in one order or another") {
  int wrong = 0;
  for (const auto order : {simt::Order::forward, simt::Order::reversed, simt::Order::shuffled}) {
    schedule(order);
    const auto good = exchange(true);
    const auto bad = exchange(false);
    for (int i = 0; i < 128; ++i) {
      CHECK(good[static_cast<std::size_t>(i)] == 127 - i);
      wrong += bad[static_cast<std::size_t>(i)] != 127 - i;
    }
  }
  CHECK(wrong > 0);
}

TEST_CASE("a barrier that not all threads reach is reported") {
  schedule(simt::Order::forward);
  CHECK_THROWS_WITH_AS(simt::launch(1, 64, 0,
                                    [] {
                                      if (ptx::thread_index() < 32) ptx::barrier();
                                    }),
                       doctest::Contains("32 wait at a barrier"), simt::Fault);
  CHECK_THROWS_WITH_AS(simt::launch(1, 32, 0,
                                    [] {
                                      if (ptx::thread_index() < 5) (void)ptx::shuffle_xor(1, 1);
                                    }),
                       doctest::Contains("5 in a warp operation"), simt::Fault);
}

TEST_CASE("lanes and threads that meet at different places are reported") {
  schedule(simt::Order::forward);
  const auto shuffles = [] {
    if (ptx::thread_index() < 5)
      (void)ptx::shuffle_xor(1, 1);
    else
      (void)ptx::shuffle_xor(1, 1);
  };
  const auto votes = [] {
    if (ptx::thread_index() < 5)
      (void)ptx::any(true);
    else
      (void)ptx::any(true);
  };
  const auto products = [] {
    float d[4] = {};
    const std::uint32_t a[4] = {};
    if (ptx::thread_index() < 5)
      ptx::mma<half>(d, a, 0, 0);
    else
      ptx::mma<half>(d, a, 0, 0);
  };
  const auto matrices = [] {
    std::uint32_t r[4];
    if (ptx::thread_index() < 5)
      ptx::ldmatrix_x4(r, {0});
    else
      ptx::ldmatrix_x4(r, {0});
  };
  const auto barriers = [] {
    if (ptx::thread_index() < 32)
      ptx::barrier();
    else
      ptx::barrier();
  };
  const auto meets = [](const auto& kernel) {
    CHECK_THROWS_WITH_AS(simt::launch(1, 32, 64, kernel), doctest::Contains("different operations"),
                         simt::Fault);
  };
  meets(shuffles);
  meets(votes);
  meets(products);
  meets(matrices);
  CHECK_THROWS_WITH_AS(simt::launch(1, 64, 0, barriers), doctest::Contains("different barriers"),
                       simt::Fault);
}

TEST_CASE("atomics of two words without a fence between them are reported") {
  schedule(simt::Order::forward);
  int words[2] = {};
  const auto run = [&](bool fenced) {
    simt::launch(1, 64, 0, [&] {
      if (ptx::thread_index() == 33) ptx::atomic_add(&words[0], 1);
      ptx::barrier();
      if (ptx::thread_index() != 0) return;
      if (fenced) ptx::fence();
      ptx::atomic_add(&words[1], 1);
    });
  };
  CHECK_NOTHROW(run(true));
  CHECK_THROWS_WITH_AS(run(false), doctest::Contains("without a fence"), simt::Fault);
}

TEST_CASE("a launch that no device takes is reported") {
  schedule(simt::Order::forward);
  for (const auto& [grid, threads] : {std::pair{0, 32}, {1, 0}, {1, 33}, {1, 1056}})
    CHECK_THROWS_AS(simt::launch(grid, threads, 0, [] {}), simt::Fault);
}

TEST_CASE("blocks take turns, as many as are resident") {
  for (const auto order : {simt::Order::forward, simt::Order::reversed, simt::Order::shuffled})
    for (const int resident : {1, 2, 3}) {
      schedule(order);
      simt::current_schedule().resident = resident;
      int under_way = 0, most = 0;
      std::vector<int> seen;
      simt::launch(6, 64, 0, [&] {
        if (ptx::thread_index() == 0) most = std::max(most, ++under_way);
        for (int i = 0; i < 20; ++i) {
          if (ptx::thread_index() == 0) seen.push_back(ptx::block_index());
          ptx::barrier();
        }
        if (ptx::thread_index() == 0) --under_way;
      });
      CHECK(seen.size() == 120);
      // One that need not wait for another goes on to its end.
      if (order == simt::Order::reversed) CHECK(most == 1);
      if (order == simt::Order::forward) CHECK(most == resident);
      CHECK(most <= resident);
    }
}

namespace {

// Block 1 writes 64 values, one per thread, and raises a flag; block 0 waits for it and reads them
// in the opposite order. What either does may be left out.
struct Exchange {
  bool barrier_before_release = true, release = true, wait = true, acquire = true,
       barrier_after_acquire = true;

  std::vector<int> run() const {
    std::vector<int> data(64, -1), out(64, -1);
    std::uint32_t flag = 0;
    simt::launch(2, 64, 0, [&] {
      const auto thread = static_cast<std::size_t>(ptx::thread_index());
      if (ptx::block_index() == 1) {
        ptx::store(&data[thread], static_cast<int>(thread));
        if (barrier_before_release) ptx::barrier();
        if (thread == 0 && release) ptx::store_release(&flag, 1);
        if (thread == 0 && !release) flag = 1;
      } else {
        if (thread == 0 && wait && acquire)
          while (ptx::load_acquire(&flag) != 1) ptx::pause();
        if (thread == 0 && wait && !acquire)
          while (flag != 1) ptx::pause();
        if (barrier_after_acquire) ptx::barrier();
        out[thread] = ptx::load(&data[63 - thread]);
      }
    });
    return out;
  }
};

}  // namespace

TEST_CASE("what a block writes for another arrives by release and acquire, and not without") {
  for (const auto order : {simt::Order::forward, simt::Order::reversed, simt::Order::shuffled})
    for (const int resident : {2, 3}) {
      schedule(order);
      simt::current_schedule().resident = resident;
      const auto out = Exchange{}.run();
      for (int i = 0; i < 64; ++i) CHECK(out[static_cast<std::size_t>(i)] == 63 - i);
      // However it went: nothing old was read by luck.
      CHECK_THROWS_AS((Exchange{.barrier_before_release = false}.run()), simt::Fault);
      CHECK_THROWS_AS((Exchange{.release = false}.run()), simt::Fault);
      CHECK_THROWS_AS((Exchange{.acquire = false}.run()), simt::Fault);
      CHECK_THROWS_AS((Exchange{.barrier_after_acquire = false}.run()), simt::Fault);
    }
}

TEST_CASE("blocks that wait for one that cannot start are reported") {
  schedule(simt::Order::reversed);  // block 1 first
  simt::current_schedule().resident = 1;
  CHECK_NOTHROW((Exchange{}.run()));
  schedule(simt::Order::forward);
  simt::current_schedule().resident = 1;
  CHECK_THROWS_WITH_AS((Exchange{}.run()), doctest::Contains("1 for another block"), simt::Fault);
}

TEST_CASE("copies land at issue or at the wait for their group") {
  alignas(16) std::vector<float> source(8, 3.0f);
  for (const auto copies : {simt::Copies::at_issue, simt::Copies::at_wait}) {
    schedule(simt::Order::forward, copies);
    float before = 0, first = 0, second = 0;
    simt::launch(1, 32, 64, [&] {
      const float* shared = reinterpret_cast<const float*>(ptx::dynamic_shared());
      if (ptx::thread_index() != 0) return;
      ptx::cp_async_16(ptx::shared_address(shared), source.data(), true);
      ptx::cp_async_commit();
      ptx::cp_async_16(ptx::shared_address(shared + 4), source.data(), true);
      ptx::cp_async_commit();
      before = shared[0];
      ptx::cp_async_wait(1);
      first = shared[0];
      second = shared[4];
      ptx::cp_async_wait(0);
    });
    CHECK((before == 3.0f) == (copies == simt::Copies::at_issue));
    CHECK(first == 3.0f);
    CHECK((second == 3.0f) == (copies == simt::Copies::at_issue));
  }
}

TEST_CASE("copies left under way, out of range or misaligned are reported") {
  schedule(simt::Order::forward);
  alignas(16) float source[8] = {};
  const auto copy_to = [&](std::uint32_t offset, bool wait) {
    simt::launch(1, 32, 64, [&] {
      if (ptx::thread_index() != 0) return;
      ptx::cp_async_16({offset}, source, true);
      ptx::cp_async_commit();
      if (wait) ptx::cp_async_wait(0);
    });
  };
  CHECK_NOTHROW(copy_to(48, true));
  CHECK_THROWS_AS(copy_to(64, true), simt::Fault);
  CHECK_THROWS_AS(copy_to(8, true), simt::Fault);
  CHECK_THROWS_WITH_AS(copy_to(0, false), doctest::Contains("under way"), simt::Fault);
}

TEST_CASE("mma and ldmatrix multiply matrices") {
  schedule(simt::Order::shuffled);
  // A[16][16] and B[8 columns][16], row by row in shared memory; D = A * B.
  float d[16][8];
  simt::launch(1, 32, (16 + 16) * 32, [&] {
    half* a = reinterpret_cast<half*>(ptx::dynamic_shared());
    half* b = a + 256;
    const int lane = ptx::thread_index();
    for (int i = lane; i < 256; i += 32) {
      a[i] = chunkattn::to_half(static_cast<float>(i / 16 - i % 16));
      b[i] = chunkattn::to_half(static_cast<float>(i / 16 * 2 + i % 16 % 5));
    }
    ptx::barrier();
    std::uint32_t fa[4], fb[4];
    ptx::ldmatrix_x4(fa, ptx::shared_address(a + lane % 16 * 16 + lane / 16 * 8));
    ptx::ldmatrix_x4(fb,
                     ptx::shared_address(b + (lane / 16 * 8 + lane % 8) * 16 + lane / 8 % 2 * 8));
    float c[4] = {};
    ptx::mma<half>(c, fa, fb[0], fb[1]);
    for (int i = 0; i < 4; ++i) d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = c[i];
  });
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      float sum = 0;
      for (int k = 0; k < 16; ++k)
        sum += static_cast<float>(row - k) * static_cast<float>(column * 2 + k % 5);
      CHECK(d[row][column] == sum);
    }
}
