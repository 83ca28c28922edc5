// Settings: the values of the command line.
#pragma once

#include <string>

namespace shared_prompt {

struct Settings {
  int requests = 32, system_tokens = 0, num_qo_heads = 32, num_kv_heads = 32, threads = 0,
      prefill = 512, rounds = 9;
  std::string kv = "fp32", device = "cpu", json;
  double memory_gib = 3.2;
  bool check = false, hide_tree = false;
};

/// Serves, measures and reports with K and V stored as T. Returns the program's exit status.
template <class T>
int run(const Settings& settings);

}  // namespace shared_prompt
