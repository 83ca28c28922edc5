// A model with its tokenizer, as command lines name them.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <memory>
#include <optional>
#include <string>

#include "../support/options.hpp"
#include "engine/engine.hpp"
#include "model/load.hpp"
#include "ranks/communicator.hpp"
#include "text/chat_template.hpp"
#include "text/tokenizer.hpp"

namespace serve {

/// Options of all commands that run a model.
struct ModelArguments {
  std::string model;      ///< a GGUF file or a llama2.c checkpoint
  std::string tokenizer;  ///< of a checkpoint
  std::string random;     ///< or a shape, see read_shape()
  std::string weights = "auto", kv = "auto", products = "auto", mode = "deterministic";
  int threads = 0;

  void add_to(examples::Options& options);
};

struct LoadedModel {
  Model model;
  std::unique_ptr<Tokenizer> tokenizer;
  std::optional<ChatTemplate> chat;
  std::string no_chat;  ///< why there is none
};

/// The model, or this rank's part of it.
/// \throws examples::UsageError, FileError; std::invalid_argument where it has no such parts
[[nodiscard]] LoadedModel load(const ModelArguments& arguments, chunkattn::ThreadPool& executor,
                               const Communicator& ranks = alone());

/// Threads of the pool as --threads says: 0 is all processors, of several ranks one each.
[[nodiscard]] int thread_count(const ModelArguments& arguments, const Communicator& ranks);

[[nodiscard]] ProductKind product_kind(const ModelArguments& arguments);
[[nodiscard]] KvType kv_type(const ModelArguments& arguments, const Model& model);
[[nodiscard]] chunkattn::CpuOptions::Reduce reduce_of(const ModelArguments& arguments);

/// Products::try_out(), with a line to stderr where something is not as asked for.
void try_out(Products& products, const Model& model);

/// "30 layers, dim 576, ...": one line.
[[nodiscard]] std::string describe(const Model& model);

}  // namespace serve
