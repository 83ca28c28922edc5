// Array against std::vector: the same contents after any sequence of operations.
#include "chunkattn/detail/support/array.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "tests/support/random.hpp"

using chunkattn::Array;

namespace {

struct alignas(64) Record {
  int a = 7;
  std::int64_t b = -1;
  friend bool operator==(const Record&, const Record&) = default;
};

bool same(const Array<Record>& array, const std::vector<Record>& vector) {
  return array.size() == vector.size() && array.empty() == vector.empty() &&
         std::equal(array.begin(), array.end(), vector.begin());
}

}  // namespace

TEST_CASE("any sequence of operations leaves what std::vector holds") {
  test::Random random(71);
  for (int round = 0; round < test::scaled(50); ++round) {
    Array<Record> array;
    std::vector<Record> vector;
    for (int step = 0; step < 200; ++step) {
      const Record value{random.uniform(0, 9), step};
      const auto size = static_cast<std::size_t>(random.uniform(0, 40));
      const std::size_t at = vector.empty() ? 0 : random.index(vector.size());
      switch (random.uniform(0, 12)) {
        case 0:
          array.resize(size);
          vector.resize(size);
          break;
        case 1:
          array.resize(size, value);
          vector.resize(size, value);
          break;
        case 2:
          if (vector.empty()) {
            array.assign(size, value);
            vector.assign(size, value);
          } else {  // an element of its own
            array.assign(size, array[at]);
            vector.assign(size, Record(vector[at]));
          }
          break;
        case 3:
          array.insert(array.begin() + at, value);
          vector.insert(vector.begin() + static_cast<std::ptrdiff_t>(at), value);
          break;
        case 4:
          array.erase_if([&](const Record& r) { return r.a == value.a; });
          std::erase_if(vector, [&](const Record& r) { return r.a == value.a; });
          break;
        case 5:
          array.reserve(size);
          CHECK(array.capacity() >= size);
          break;
        case 6: {
          Array<Record> copy(array);
          CHECK(copy == array);
          copy.push_back(value);
          CHECK_FALSE(copy == array);
          array = copy;
          vector.push_back(value);
          break;
        }
        case 7: {
          Array<Record> moved(std::move(array));
          CHECK(array.empty());
          array.push_back(value);  // released by what follows
          array = std::move(moved);
          CHECK(moved.empty());
          break;
        }
        case 8:
          if (!vector.empty()) {  // an element of its own, while it grows
            array.push_back(array[at]);
            vector.push_back(Record(vector[at]));
            array.resize(array.size() + 50, array[at]);
            vector.resize(vector.size() + 50, Record(vector[at]));
          }
          break;
        case 9:
          if (!vector.empty()) {
            CHECK(array.front() == vector.front());
            CHECK(array.back() == vector.back());
            array.pop_back();
            vector.pop_back();
          }
          break;
        default:
          array.push_back(value);
          vector.push_back(value);
      }
      REQUIRE(same(array, vector));
      CHECK(reinterpret_cast<std::uintptr_t>(array.data()) % alignof(Record) == 0);
    }
    array.clear();
    CHECK(array.empty());
  }
}

TEST_CASE("growing by one takes amortised constant time: capacities double") {
  Array<int> array;
  int growths = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::size_t before = array.capacity();
    array.push_back(i);
    growths += array.capacity() != before ? 1 : 0;
  }
  CHECK(growths == 11);
}

TEST_CASE("memory that is not there: std::bad_alloc, and the array is as it was") {
  Array<Record> array{{1, 2}, {3, 4}};
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  for (const std::size_t size : {most, most / sizeof(Record), most / 100}) {
    CHECK_THROWS_AS(array.resize(size), std::bad_alloc);
    CHECK_THROWS_AS(array.reserve(size), std::bad_alloc);
    CHECK(array == Array<Record>{{1, 2}, {3, 4}});
  }
}
