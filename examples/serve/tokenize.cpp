// serve tokenize: the tokens of a list of texts as JSON, for comparing with other tokenizers.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../support/options.hpp"
#include "commands.hpp"
#include "model/json_file.hpp"
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
  auto all = nlohmann::json::array();
  with_json(texts_file, read_text(texts_file), [&](const nlohmann::json& texts) {
    for (const auto& text : texts) {
      const TextPart part{text.get<std::string>(), !content};
      all.push_back(tokenizer->encode({&part, 1}));
    }
  });
  fmt::print("{}\n", all.dump());
  return 0;
}

}  // namespace serve
