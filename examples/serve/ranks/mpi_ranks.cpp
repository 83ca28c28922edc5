#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../support/options.hpp"
#include "run_rank.hpp"

namespace serve {

namespace {

/// MPI's counts are ints.
int to_count(std::size_t n) {
  if (n > static_cast<std::size_t>(std::numeric_limits<int>::max()))
    throw std::length_error("a message of " + std::to_string(n) + " elements: expected fewer");
  return static_cast<int>(n);
}

class MpiRanks final : public Communicator {
 public:
  MpiRanks() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
  }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }

  /// Other ranks wait here for what rank 0 decides, which may take hours: after a millisecond they
  /// sleep between looks and leave the processor to others.
  void broadcast(std::span<std::byte> bytes) override {
    MPI_Request request;
    MPI_Ibcast(bytes.data(), to_count(bytes.size()), MPI_BYTE, 0, MPI_COMM_WORLD, &request);
    const auto start = std::chrono::steady_clock::now();
    for (int done = 0;;) {
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done) return;
      if (std::chrono::steady_clock::now() - start > std::chrono::milliseconds(1))
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      else
        std::this_thread::yield();
    }
  }

  /// Each rank adds a share of the values, in the order of the ranks, and everybody gets it from
  /// there.
  void sum(std::span<float> values) override {
    if (size_ == 1) return;
    const std::size_t own = share_of(values.size(), rank_, size_).size();
    const auto ranks = static_cast<std::size_t>(size_);
    counts_.resize(ranks);
    offsets_.resize(ranks);
    own_counts_.assign(ranks, to_count(own));
    own_offsets_.resize(ranks);
    for (int r = 0; r < size_; ++r) {
      const Share share = share_of(values.size(), r, size_);
      const auto i = static_cast<std::size_t>(r);
      counts_[i] = to_count(share.size());
      offsets_[i] = to_count(share.begin);
      own_offsets_[i] = to_count(i * own);
    }
    terms_.resize(ranks * own);
    MPI_Alltoallv(values.data(), counts_.data(), offsets_.data(), MPI_FLOAT, terms_.data(),
                  own_counts_.data(), own_offsets_.data(), MPI_FLOAT, MPI_COMM_WORLD);
    float* const sums = values.data() + share_of(values.size(), rank_, size_).begin;
    for (std::size_t i = 0; i < own; ++i) sums[i] = terms_[i];
    for (std::size_t r = 1; r < ranks; ++r)
      for (std::size_t i = 0; i < own; ++i) sums[i] += terms_[r * own + i];
    MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_FLOAT, values.data(), counts_.data(), offsets_.data(),
                   MPI_FLOAT, MPI_COMM_WORLD);
  }

  void gather(std::span<const float> values, std::span<float> all) override {
    const int count = to_count(values.size());
    MPI_Gather(values.data(), count, MPI_FLOAT, all.data(), count, MPI_FLOAT, 0, MPI_COMM_WORLD);
  }

 private:
  int rank_ = 0, size_ = 1;
  std::vector<int> counts_, offsets_, own_counts_, own_offsets_;  // of sum()
  std::vector<float> terms_;                                      // [size][own share]
};

/// Says why and ends all ranks. Where all fail alike, rank 0 speaks for them: the others give it a
/// moment. And mpirun gets one to pass the message on.
[[noreturn]] void end_job(const Communicator& ranks, const char* message, int status) {
  using std::chrono::milliseconds;
  if (ranks.rank() != 0) std::this_thread::sleep_for(milliseconds(500));
  std::fflush(stdout);
  std::fprintf(stderr, "serve: rank %d of %d: %s\n", ranks.rank(), ranks.size(), message);
  std::this_thread::sleep_for(milliseconds(200));
  MPI_Abort(MPI_COMM_WORLD, status);
  std::abort();  // not reached
}

}  // namespace

int detail::run_mpi_rank(const RankBody& body) {
  // One thread at a time calls MPI; with a server it is not the main thread.
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
  int status = 1;
  MpiRanks ranks;
  try {
    if (provided < MPI_THREAD_SERIALIZED)
      throw std::runtime_error("this MPI lets nobody call it but the main thread");
    status = body(ranks);
  } catch (const examples::UsageError& error) {
    end_job(ranks, error.what(), 2);
  } catch (const std::exception& error) {
    end_job(ranks, error.what(), 1);
  }
  MPI_Finalize();
  return status;
}

}  // namespace serve
