// The commands of the program.
#pragma once

namespace serve {

/// serve bench: a load of requests with times of arrival, and how they fared.
int bench(int argc, char** argv);
/// serve generate: continues a list of prompts, all in one batch.
int generate(int argc, char** argv);
/// serve run: serves a model over HTTP.
int run(int argc, char** argv);
/// serve score: what a model says of tokens that are given.
int score(int argc, char** argv);
/// serve tokenize: the tokens of a list of texts, for comparing with other tokenizers.
int tokenize(int argc, char** argv);

}  // namespace serve
