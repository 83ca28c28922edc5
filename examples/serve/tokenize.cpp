// serve tokenize: the tokens of a list of texts as JSON, for comparing with other tokenizers.
#include <fmt/format.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../support/options.hpp"
#include "commands.hpp"
#include "text/tokenizer.hpp"

namespace serve {

int tokenize(int argc, char** argv) {
  std::string model, texts_file;
  bool content = false;
  examples::Options options("serve tokenize", "prints the tokens of texts as a list of lists");
  options.text("--model", "FILE", "a GGUF file; its vocabulary is enough", model);
  options.text("--texts", "FILE.json", "a list of texts", texts_file);
  options.flag("--content", "as what is said in a chat: no special tokens", content);
  if (!options.parse(argc, argv)) return 0;
  if (model.empty() || texts_file.empty())
    throw examples::UsageError("expected both --model FILE and --texts FILE.json");
  const auto tokenizer = read_tokenizer(Gguf(model));
  std::ifstream file(texts_file, std::ios::binary);
  if (!file) throw FileError(texts_file + ": cannot be opened");
  auto all = nlohmann::json::array();
  try {
    for (const auto& text : nlohmann::json::parse(file)) {
      const TextPart part{text.get<std::string>(), !content};
      all.push_back(tokenizer->encode({&part, 1}));
    }
  } catch (const nlohmann::json::exception& error) {
    const std::string text = error.what();
    throw FileError(texts_file + ": JSON: " + text.substr(text.find(' ') + 1));
  }
  fmt::print("{}\n", all.dump());
  return 0;
}

}  // namespace serve
