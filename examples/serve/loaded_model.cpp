#include "loaded_model.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <utility>

#include "../support/table.hpp"
#include "parallel/split_model.hpp"

namespace serve {

void ModelArguments::add_to(examples::Options& options) {
  options.text("--model", "FILE", "a GGUF file, or a llama2.c checkpoint", model);
  options.text("--tokenizer", "FILE", "of a llama2.c checkpoint", tokenizer);
  options.text("--random", "SHAPE",
               "random weights: llama2-7b, llama3-8b or a JSON file with the shape", random);
  options.choice("--weights", {"auto", "fp32", "bf16"},
                 "what weights are kept as; auto: bf16, of a checkpoint fp32", weights);
  options.choice("--kv", {"auto", "fp32", "fp16", "bf16"},
                 "what K and V are kept as; auto: as the weights", kv);
  options.choice("--products", {"auto", "own", "onednn"},
                 "who multiplies; auto: oneDNN where there is one", products);
  options.choice("--mode", {"deterministic", "batch_invariant", "spin_lock"},
                 "batch_invariant: a text has the same bits in any company", mode);
  options.number("--threads", "N", "0: one for each processor; of a rank 1", threads, 0, 1024);
}

ProductKind product_kind(const ModelArguments& arguments) {
  const bool invariant = arguments.mode == "batch_invariant";
  if (arguments.products == "onednn") {
    if (invariant)
      throw examples::UsageError(
          "--products = onednn: expected own beside --mode batch_invariant: the order of oneDNN's "
          "sums depends on the number of rows");
    if (!built_with_onednn)
      throw examples::UsageError("--products = onednn: this program was built without oneDNN");
  }
  return arguments.products == "own" || invariant || !built_with_onednn ? ProductKind::own
                                                                        : ProductKind::onednn;
}

KvType kv_type(const ModelArguments& arguments, const Model& model) {
  if (arguments.kv == "fp16") return KvType::fp16;
  const bool bf16 =
      arguments.kv == "auto" ? model.embedding.element() == Element::bf16 : arguments.kv == "bf16";
  return bf16 ? KvType::bf16 : KvType::fp32;
}

chunkattn::CpuOptions::Reduce reduce_of(const ModelArguments& arguments) {
  if (arguments.mode == "batch_invariant") return chunkattn::CpuOptions::Reduce::batch_invariant;
  return arguments.mode == "spin_lock" ? chunkattn::CpuOptions::Reduce::spin_lock
                                       : chunkattn::CpuOptions::Reduce::deterministic;
}

namespace {

LoadedModel load_file(const ModelArguments& arguments, Element element,
                      chunkattn::ThreadPool& executor) {
  LoadedModel loaded;
  if (!is_gguf(arguments.model)) {
    if (arguments.tokenizer.empty())
      throw examples::UsageError("--tokenizer: expected the file of this checkpoint's tokenizer");
    loaded.model = load_llama2c(arguments.model, element);
    loaded.tokenizer = read_llama2c_tokenizer(arguments.tokenizer, loaded.model.config.vocab_size);
    loaded.no_chat = "a llama2.c checkpoint has no chat template";
    return loaded;
  }
  if (!arguments.tokenizer.empty())
    throw examples::UsageError("--tokenizer: expected none beside a GGUF file, which has its own");
  const Gguf gguf(arguments.model);
  loaded.tokenizer = read_tokenizer(gguf);
  loaded.model = load_gguf(gguf, element, executor);
  try {
    loaded.chat.emplace(gguf);
  } catch (const FileError& error) {  // the model can still go on with plain prompts
    loaded.no_chat = error.what();
  }
  return loaded;
}

LoadedModel load_whole(const ModelArguments& arguments, chunkattn::ThreadPool& executor) {
  if (arguments.model.empty() == arguments.random.empty())
    throw examples::UsageError("expected --model FILE or --random SHAPE, and not both");
  const bool checkpoint = !arguments.model.empty() && !is_gguf(arguments.model);
  const bool fp32 = arguments.weights == "auto" ? checkpoint : arguments.weights == "fp32";
  const Element element = fp32 ? Element::fp32 : Element::bf16;
  if (!arguments.model.empty()) return load_file(arguments, element, executor);
  LoadedModel loaded;
  const Config config = read_shape(arguments.random);
  if (config.vocab_size < 259)
    throw examples::UsageError(
        fmt::format("--random = {}: vocab_size = {}: expected at least 259, a token for each byte",
                    arguments.random, config.vocab_size));
  loaded.model = random_model(config, element, 2024, executor);
  loaded.tokenizer = byte_tokenizer(config.vocab_size);
  loaded.no_chat = "random weights have no chat template";
  return loaded;
}

}  // namespace

LoadedModel load(const ModelArguments& arguments, chunkattn::ThreadPool& executor,
                 const Communicator& ranks) {
  LoadedModel loaded = load_whole(arguments, executor);
  if (ranks.size() > 1) loaded.model = part_of(std::move(loaded.model), ranks.rank(), ranks.size());
  return loaded;
}

int thread_count(const ModelArguments& arguments, const Communicator& ranks) {
  return arguments.threads == 0 && ranks.size() > 1 ? 1 : arguments.threads;
}

void try_out(Products& products, const Model& model) {
  const std::string said = products.try_out(model);
  if (!said.empty())
    fmt::print(stderr, "{} {}\n", examples::bold("products"), examples::wrapped(said, 9));
}

std::string describe(const Model& model) {
  const Config& c = model.config;
  return fmt::format(
      "{} layers, dim {}, {} query heads over {} K/V heads of {}, {} pieces, {} {:.0f} MiB",
      c.num_layers, c.dim, c.num_qo_heads, c.num_kv_heads, c.head_dim(), c.vocab_size,
      model.embedding.element() == Element::fp32 ? "fp32" : "bf16",
      static_cast<double>(model.weight_bytes()) / (1 << 20));
}

}  // namespace serve
