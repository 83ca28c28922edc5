"""Choosing tokens, with transformers' own GenerationConfig, processors and criteria."""

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors_of
from transformers.generation import stopping_criteria as criteria_of
from transformers.generation.configuration_utils import GenerationMode

from .requests import LENGTH, STOP

# These look at no tokens and treat rows alike: one call serves all rows.
ROWS_ALONE = tuple(
    getattr(processors_of, name)
    for name in ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper",
                 "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization",
                 "InfNanRemoveLogitsProcessor")
    if hasattr(processors_of, name)
)  # fmt: skip
# What has no effect here is refused, and what to do instead.
NOT_HERE = {
    "num_return_sequences": "see n",
    **dict.fromkeys(("output_scores", "output_logits"), "a logits_processor sees them"),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), "call the model for them"),
}


class Sampler:
    """How one request's tokens are chosen, and when its texts end."""

    def __init__(self, model, generation_config, prompt_length, *, logits_processor=None, stopping_criteria=None,
                 prefix_allowed_tokens_fn=None, tokenizer=None, seed=None, n=1, limit=None, changes=None):  # fmt: skip
        config, unknown = model._prepare_generation_config(generation_config, **(changes or {}))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: expected parameters of GenerationConfig")
        mode = config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(f"generation mode '{mode.value}': expected greedy search or sampling")
        if config.guidance_scale not in (None, 1, 1.0):
            raise ValueError(f"guidance_scale = {config.guidance_scale}: expected none: it would run the model twice")
        for name, instead in NOT_HERE.items():
            value = getattr(config, name, None)
            if value is True or (value or 0) > 1:
                raise ValueError(f"{name} = {value}: expected none, {instead}")
        given = generation_config.max_length if generation_config is not None else (changes or {}).get("max_length")
        length = config.max_length or 20
        if config.max_new_tokens is not None:
            length = prompt_length + config.max_new_tokens
        elif given is None and model.generation_config.max_length in (None, 20):
            length = prompt_length + length  # transformers' default is 20 new ones
        if length <= prompt_length:
            raise ValueError(f"max_length = {length}: expected more than the prompt's {prompt_length} tokens")
        if limit is not None and length - 1 > limit:
            raise ValueError(f"max_length = {length}: expected at most the model's {limit} positions and one more")
        self.max_length = config.max_length = length
        if config.min_new_tokens is not None:
            config.min_length = config.min_new_tokens + prompt_length
        model._prepare_special_tokens(config, True, device="cpu")
        self.processors = model._get_logits_processor(
            config, input_ids_seq_length=prompt_length, prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            logits_processor=LogitsProcessorList(logits_processor or []), device="cpu")  # fmt: skip
        criteria = model._get_stopping_criteria(config, StoppingCriteriaList(stopping_criteria or []), tokenizer)
        # These two are known without tensors.
        end = config._eos_token_tensor
        self.end = set() if end is None else set(end.tolist())
        own = (criteria_of.MaxLengthCriteria, criteria_of.EosTokenCriteria)
        self.criteria = [c for c in criteria if not isinstance(c, own)]
        self.samples = mode is GenerationMode.SAMPLE
        # Rows of samplers with equal keys may be processed in one call.
        self.key = None
        if all(isinstance(p, ROWS_ALONE) for p in self.processors):
            self.key = tuple((type(p), repr(sorted(vars(p).items()))) for p in self.processors)
        self.generators = []
        if self.samples:
            if seed is None:
                seed = int(torch.randint(2**31, ()))
            self.generators = [torch.Generator().manual_seed(seed + choice) for choice in range(n)]

    def finish_reason(self, tokens, token, scores):
        """Whether a text of `tokens` ends with `token`."""
        if token in self.end:
            return STOP
        if self.criteria:
            ids = torch.tensor([[*tokens, token]])
            if any(bool(torch.as_tensor(c(ids, scores)).all()) for c in self.criteria):
                return STOP
        return LENGTH if len(tokens) + 1 >= self.max_length else None


def choose(rows):
    """For each of rows, (sampler, choice, tokens so far, logits [vocabulary]): (token, finish reason, error).

    What processors and criteria raise is the row's error: the others have nothing to do with it.
    """
    groups = {}
    for at, (sampler, *_) in enumerate(rows):
        key = sampler.key
        groups.setdefault(at if key is None else key, []).append(at)
    chosen = [None] * len(rows)
    for members in groups.values():
        try:
            scores = _processed([rows[at] for at in members])
            greedy = scores.argmax(-1).tolist()
            probabilities = scores.softmax(-1) if any(rows[at][0].samples for at in members) else None
        except Exception as error:
            for at in members:
                chosen[at] = (None, None, error)
            continue
        for i, at in enumerate(members):
            sampler, choice, tokens, _ = rows[at]
            try:
                token = greedy[i]
                if sampler.samples:
                    token = int(torch.multinomial(probabilities[i], 1, generator=sampler.generators[choice]))
                chosen[at] = (token, sampler.finish_reason(tokens, token, scores[i : i + 1]), None)
            except Exception as error:
                chosen[at] = (None, None, error)
    return chosen


def _processed(rows):
    """Scores of rows that may be processed in one call: [rows][vocabulary]."""
    scores = torch.stack([logits for *_, logits in rows]).float()
    sampler, _, tokens, _ = rows[0]
    if not sampler.processors:
        return scores
    ids = torch.tensor([tokens]) if len(rows) == 1 else torch.zeros(len(rows), 1).long()
    scores = sampler.processors(ids, scores)
    if not isinstance(scores, torch.Tensor) or scores.dim() != 2 or scores.shape[0] != len(rows):
        raise ValueError(f"logits_processor: its result is {_said(scores)}, expected scores ({len(rows)}, vocabulary)")
    return scores


def _said(result):
    return f"a tensor {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
