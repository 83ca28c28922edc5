// Models from files, or of a given shape with random weights.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <cstdint>
#include <string>

#include "gguf.hpp"
#include "model.hpp"

namespace serve {

/// Whether the file begins as a GGUF file does. Throws FileError if it cannot be read.
[[nodiscard]] bool is_gguf(const std::string& path);

/// A model of architecture llama, qwen2, qwen3, phi3 or gemma3. Rotary pairs of a model in memory
/// stand side by side, as they do in files of the first and in llama2.c's; of the others, where
/// half a head lies between them, the outputs of Q and K are permuted.
/// \throws FileError that names the key or the tensor
[[nodiscard]] Model load_gguf(const Gguf& gguf, Element element, chunkattn::ThreadPool& executor);

/// A llama2.c checkpoint: seven integers, then all weights as floats.
/// \throws FileError that names the field of the header
[[nodiscard]] Model load_llama2c(const std::string& path, Element element);

/// The shape that "llama2-7b", "llama3-8b" or a JSON file names: an object with the fields of
/// Config. \throws FileError
[[nodiscard]] Config read_shape(const std::string& name_or_file);

/// Random weights, scaled so that activations neither vanish nor blow up.
[[nodiscard]] Model random_model(const Config& config, Element element, std::uint64_t seed,
                                 chunkattn::ThreadPool& executor);

/// Names of the fields of a shape in the format it comes from, for messages.
struct ShapeNames {
  const char *dim, *hidden_dim, *num_layers, *num_qo_heads, *num_kv_heads, *vocab_size,
      *max_positions;
};

/// Refuses shapes that no model has. \throws FileError: path, field, value, what was expected
void check_shape(const Config& config, const std::string& path, const ShapeNames& names);

}  // namespace serve
