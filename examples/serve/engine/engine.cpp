#include "engine.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "tree_engines.hpp"

namespace serve {

namespace {

bool has_tiers(const EngineOptions& options) {
  return options.tiers.memory_bytes > 0 || !options.tiers.directory.empty();
}

void check(const Config& config, const EngineOptions& options, int ranks) {
  const auto fail = [](const std::string& what) { throw std::invalid_argument(what); };
  if (options.step_tokens < 1) fail("step_tokens = 0: expected at least 1");
  if (!(options.step_seconds > 0)) fail("step_seconds: expected more than 0");
  if (ranks > 1 && std::isfinite(options.step_seconds))
    fail("step_seconds: expected none beside several ranks, whose clocks differ");
  if (options.max_sequences < 1) fail("max_sequences = 0: expected at least 1");
  if (options.on_gpu && options.mode != Mode::tree) fail("mode: expected tree beside on_gpu");
  if (has_tiers(options) && (options.on_gpu || options.mode == Mode::paged || ranks > 1))
    fail("tiers: expected none beside on_gpu, mode paged, or several ranks");
  if (options.on_gpu && options.preempt != Preempt::recompute)
    fail("preempt: expected recompute beside on_gpu");
  if (has_window_chunks(config, options))
    if (const std::size_t least =
            std::min(least_window_chunks(config, options), options.max_chunks);
        max_window_chunks(options) < least)
      fail("max_window_chunks = " + std::to_string(max_window_chunks(options)) +
           ": expected at least " + std::to_string(least) + ", what a window of " +
           std::to_string(config.window) + " takes");
}

}  // namespace

bool has_window_chunks(const Config& config, const EngineOptions& options) {
  const bool all =
      config.num_local() == config.num_layers;  // tiers are of K/V in the tree's chunks
  return !options.keeps_windows && config.num_local() > 0 && options.mode == Mode::tree &&
         !options.on_gpu && !(all && has_tiers(options));
}
std::size_t max_window_chunks(const EngineOptions& options) {
  return options.max_window_chunks > 0 ? options.max_window_chunks : options.max_chunks;
}
std::size_t least_window_chunks(const Config& config, const EngineOptions& options) {
  return to_size(config.window + options.chunk_size - 2) / to_size(options.chunk_size) + 1;
}

WindowRoom window_room(const Config& config, const EngineOptions& options,
                       std::size_t layer_chunks) {
  constexpr std::size_t part = 4;
  const std::size_t windowed = to_size(config.num_local());
  const std::size_t others = to_size(config.num_layers) - windowed;
  const std::size_t step = options.step_tokens / to_size(options.chunk_size) + 1;
  const std::size_t least = 2 * least_window_chunks(config, options) + step;
  const auto left = [layer_chunks](std::size_t taken) {
    return layer_chunks - std::min(layer_chunks, taken);
  };
  WindowRoom room{options.max_chunks, options.max_window_chunks};
  const std::size_t of_all = layer_chunks / to_size(config.num_layers);
  if (room.chunks > 0 && room.window_chunks == 0) {
    room.window_chunks = std::max(room.chunks / part, std::min(least, room.chunks));
  } else if (room.chunks == 0) {
    if (room.window_chunks == 0)
      room.window_chunks =
          std::max(layer_chunks / (part * others + windowed), std::min(least, of_all));
    room.chunks =
        others == 0 ? part * room.window_chunks : left(room.window_chunks * windowed) / others;
  }
  return {std::max<std::size_t>(room.chunks, 2), std::max<std::size_t>(room.window_chunks, 2)};
}

std::unique_ptr<Engine> make_engine(const Model& model, Products& products,
                                    const EngineOptions& options) {
  check(model.config, options, products.ranks().size());
  switch (options.chunk_size) {  // a constant of the tree's type
    case 8:
      return make_tree_engine<8>(model, products, options);
    case 16:
      return make_tree_engine<16>(model, products, options);
    case 32:
      return make_tree_engine<32>(model, products, options);
    case 64:
      return make_tree_engine<64>(model, products, options);
    default:
      throw std::invalid_argument("chunk_size = " + std::to_string(options.chunk_size) +
                                  ": expected 8, 16, 32 or 64");
  }
}

}  // namespace serve
