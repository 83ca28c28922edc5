// Policies of trees that tests declare in one word: options that are set in a type.
#pragma once

#include <chunkattn/tree_options.hpp>

namespace test {

/// Nothing stays cached.
struct NoRetention : chunkattn::RetentionOptions {
  constexpr explicit(false) NoRetention(const chunkattn::RetentionOptions& options = {})
      : chunkattn::RetentionOptions(options) {
    retains = false;
  }
};

/// The lowest priority goes first.
struct ByPriority : chunkattn::RetentionOptions {
  constexpr explicit(false) ByPriority(const chunkattn::RetentionOptions& options = {})
      : chunkattn::RetentionOptions(options) {
    by_priority = true;
  }
};

}  // namespace test
