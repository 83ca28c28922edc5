"""A model of lm-evaluation-harness: its `hf` model, computed by `chunkattn.transformers.Generator`.

    python -m chunkattn.lm_eval --model chunkattn --model_args pretrained=... --tasks ...

Tokens, truncation, chat templates and prefix tokens are those of lm-eval's own HFLM, which this class extends.
"""

import inspect
import logging

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from tqdm import tqdm

from ..transformers import Generator
from ..transformers.prompts import rows_of

log = logging.getLogger(__name__)
# Of Generator; all other arguments are HFLM's.
OPTIONS = {name for name, p in inspect.signature(Generator).parameters.items() if p.kind is p.KEYWORD_ONLY}
AT_ONCE = 256  # requests that HFLM hands over at once


@register_model("chunkattn")
class ChunkAttnLM(HFLM):
    """HFLM on a prefix tree. What requests begin with alike is computed once, in whatever order they come.

    Arguments are HFLM's and Generator's (kv_bytes, step_tokens, threads, ...). batch_size has no effect: steps have
    step_tokens tokens, K/V memory kv_bytes.
    """

    def __init__(self, pretrained, *, batch_size=None, max_batch_size=None, device=None, **arguments):
        if device not in (None, "cpu", "cuda", "cuda:0"):  # the last two are lm-eval's, where none is given
            raise ValueError(f"device = {device!r}: expected 'cpu'")
        if arguments.get("softmax_dtype") not in (None, "float32", torch.float32):
            raise ValueError(f"softmax_dtype = {arguments['softmax_dtype']!r}: expected 'float32'")
        for name in ("mixed_precision_dtype", "parallelize", "tp_plan"):
            if arguments.get(name):
                raise ValueError(f"{name} = {arguments[name]!r}: expected none: it has no effect here")
        options = {name: arguments.pop(name) for name in OPTIONS & arguments.keys()}
        super().__init__(pretrained, batch_size=AT_ONCE, device="cpu", **arguments)
        self.generator = Generator(self.model, self.tokenizer, **options)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        pairs = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ValueError(f"continuation = {len(continuation)} tokens: expected at most max_length, "
                                 f"{self.max_length}")  # fmt: skip
            kept = self.max_length + 1 - len(continuation)  # the last token is not computed
            if len(context) > kept:
                log.warning("context = %d tokens: its last %d are kept, as max_length is %d and the continuation has "
                            "%d", len(context), kept, self.max_length, len(continuation))  # fmt: skip
            pairs.append((context[-kept:], continuation))
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            scores = self.generator.score_many(pairs, strict=True, progress=bar.update)
        answers = [(score.sum, score.is_greedy) for score in scores]
        for (strings, *_), answer in zip(requests, answers, strict=True):
            if strings is not None:  # not of loglikelihood_rolling(), which keeps sums of windows
                self.cache_hook.add_partial("loglikelihood", strings, answer)
        return answers

    def _model_generate(self, context, max_length, stop, attention_mask=None, **options):
        if not options.get("temperature") and options.get("do_sample") is None:  # as HFLM has it
            options["do_sample"] = False
        requests = []
        try:
            for row in rows_of({"input_ids": context, "attention_mask": attention_mask}):
                criteria = stop_sequences_criteria(self.tokenizer, stop, len(row), 1)
                requests.append(self.generator.submit(row, max_new_tokens=max_length - context.shape[1],
                                                      stopping_criteria=criteria, **options))  # fmt: skip
            while not all(request.finished for request in requests):
                self.generator.step()
                for request in requests:
                    if request.error is not None:
                        raise request.error
        finally:
            for request in requests:
                request.cancel()
        longest = max(len(request.tokens) for request in requests)
        new = [request.tokens + [self.tokenizer.pad_token_id] * (longest - len(request.tokens)) for request in requests]
        return torch.cat([context, torch.tensor(new)], dim=1)
