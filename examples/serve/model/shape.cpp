// The shape of a model by itself: what is possible, shapes by name and from JSON.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>

#include "json_file.hpp"
#include "load.hpp"

namespace serve {

void check_shape(const Config& c, const std::string& path, const ShapeNames& names) {
  const auto need = [&path](bool good, const std::string& field, double value,
                            const std::string& expected) {
    if (good) return;
    const bool whole = value == std::floor(value);
    throw FileError(
        path + ": " + field + " = " +
        (whole ? std::to_string(static_cast<long long>(value)) : std::to_string(value)) +
        ": expected " + expected);
  };
  const auto in_range = [&](const char* field, int value, int most) {
    need(value >= 1 && value <= most, field, value, "1 to " + std::to_string(most));
  };
  in_range(names.dim, c.dim, 1 << 20);
  in_range(names.hidden_dim, c.hidden_dim, 1 << 20);
  in_range(names.num_layers, c.num_layers, 1024);
  in_range(names.num_qo_heads, c.num_qo_heads, 1 << 16);
  need(c.head_size > 0 || c.dim % c.num_qo_heads == 0, names.num_qo_heads, c.num_qo_heads,
       "a divisor of " + std::string(names.dim) + ", " + std::to_string(c.dim));
  need(c.head_dim() % 2 == 0, std::string(names.dim) + " / " + names.num_qo_heads, c.head_dim(),
       "an even number");
  need(c.num_kv_heads >= 1 && c.num_qo_heads % c.num_kv_heads == 0, names.num_kv_heads,
       c.num_kv_heads,
       "a divisor of " + std::string(names.num_qo_heads) + ", " + std::to_string(c.num_qo_heads));
  in_range(names.vocab_size, c.vocab_size, 1 << 20);
  in_range(names.max_positions, c.max_positions, 1 << 24);
  need(c.norm_eps > 0 && c.norm_eps < 1, "the norm's epsilon", c.norm_eps,
       "more than 0, less than 1");
  need(c.rope_base >= 1 && c.rope_base <= 1e12f, "the base of the rotary frequencies", c.rope_base,
       "1 to 1e12");
}

Config read_shape(const std::string& name) {
  if (name == "llama2-7b") return {4096, 11008, 32, 32, 32, 32000, 4096, false, 1e-5f, 10000.0f};
  if (name == "llama3-8b") return {4096, 14336, 32, 32, 8, 128256, 8192, false, 1e-5f, 500000.0f};
  if (!std::ifstream(name))
    throw FileError(name + ": cannot be opened: expected llama2-7b, llama3-8b or a JSON file");
  Config c;
  with_json(name, read_text(name), [&](const nlohmann::json& json) {
    const auto integer = [&](const char* field, int& value) {
      const auto number = json.at(field).get<double>();
      if (!(std::abs(number) < 1e9) || number != std::floor(number))
        throw FileError(name + ": " + field + " = " + json.at(field).dump() +
                        ": expected an integer");
      value = static_cast<int>(number);
    };
    integer("dim", c.dim);
    integer("hidden_dim", c.hidden_dim);
    integer("num_layers", c.num_layers);
    integer("num_qo_heads", c.num_qo_heads);
    integer("num_kv_heads", c.num_kv_heads);
    integer("vocab_size", c.vocab_size);
    integer("max_positions", c.max_positions);
    c.tied = json.value("tied", c.tied);
    c.norm_eps = json.value("norm_eps", c.norm_eps);
    c.rope_base = json.value("rope_base", c.rope_base);
    const auto optional = [&](const char* field, int& value, int least) {
      if (!json.contains(field)) return;
      integer(field, value);
      if (value < least)
        throw FileError(name + ": " + field + " = " + std::to_string(value) +
                        ": expected at least " + std::to_string(least));
    };
    optional("head_dim", c.head_size, 2);
    optional("window", c.window, 1);
    optional("global_every", c.global_every, 1);
  });
  check_shape(c, name,
              {"dim", "hidden_dim", "num_layers", "num_qo_heads", "num_kv_heads", "vocab_size",
               "max_positions"});
  return c;
}

}  // namespace serve
