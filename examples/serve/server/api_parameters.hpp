// The parameters of requests: which there are, which are refused, and how tokens are to be sampled.
#pragma once

#include "json_fields.hpp"
#include "service.hpp"

namespace serve {

/// What a body asks for.
enum class Asks { completion, chat, score, tokens };

/// Refuses each field that would change the reply and is not implemented, unless its value is what
/// happens without it; and each that is not known, unless it is null, false or empty.
/// \throws ApiError that names the field
void refuse_what_is_missing(const Fields& fields, Asks asks);

/// How tokens are chosen, and which of their log-probabilities are returned.
/// \param vocab_size  of the model; \throws ApiError that names the field
void read_sampling(const Fields& fields, bool chat, int vocab_size, Job& job);

}  // namespace serve
