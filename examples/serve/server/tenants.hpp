// Tenants: requests with the same cache salt, which share K/V.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <unordered_map>

namespace serve {

/// Numbers for the cache salts that clients name. Equal salts get equal numbers and others never
/// do, which no hash could promise. The least recently used salt is forgotten beyond a bound: its
/// next request gets a new number and finds nothing cached, and that is all. Number 0 is no salt.
class Tenants {
 public:
  /// \pre most >= 1
  explicit Tenants(std::size_t most) : most_(most) {}

  [[nodiscard]] std::uint64_t number_of(const std::string& salt) {
    if (salt.empty()) return 0;
    const auto found = by_salt_.find(salt);
    if (found != by_salt_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second);
      return found->second->number;
    }
    if (recent_.size() == most_) {
      by_salt_.erase(recent_.back().salt);
      recent_.pop_back();
    }
    recent_.push_front({salt, ++last_});
    by_salt_.emplace(salt, recent_.begin());
    return last_;
  }
  /// The same of a salt that is remembered; 0: it is not.
  [[nodiscard]] std::uint64_t find(const std::string& salt) const {
    const auto found = by_salt_.find(salt);
    return found == by_salt_.end() ? 0 : found->second->number;
  }
  [[nodiscard]] std::size_t size() const { return recent_.size(); }

 private:
  struct Tenant {
    std::string salt;
    std::uint64_t number;
  };
  std::size_t most_;
  std::uint64_t last_ = 0;
  std::list<Tenant> recent_;  // the most recently used first
  std::unordered_map<std::string, std::list<Tenant>::iterator> by_salt_;
};

}  // namespace serve
