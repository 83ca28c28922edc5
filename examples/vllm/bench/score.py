"""What vLLM takes to score many items behind one query: all log-probabilities of the prompts, which read no cache, and
those of the next token alone, which do. Beside it: examples/serve/check/score.py, the same sizes by serve's /v1/score.

score.py MODEL [--dtype T] [--items N] [--item-tokens N] [--query-tokens N]
Of each way: processor seconds of all processes, and tokens of each prompt that were found in the cache. The query is new
to each. Without the plugin: VLLM_PLUGINS="". One thread: VLLM_CPU_OMP_THREADS_BIND=0.
"""
import argparse
import random

import psutil
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def processor_seconds():
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--items", type=int, default=50)
    parser.add_argument("--item-tokens", type=int, default=40)
    parser.add_argument("--query-tokens", type=int, default=2000)
    arguments = parser.parse_args()
    length = arguments.query_tokens + arguments.item_tokens
    llm = LLM(model=arguments.model, dtype=arguments.dtype, max_model_len=length + 8, enforce_eager=True,
              enable_prefix_caching=True, disable_log_stats=True)
    dice = random.Random(1)

    def tokens(count):
        return [dice.randrange(100, llm.llm_engine.model_config.get_vocab_size()) for _ in range(count)]

    def score(prompts, **what):
        options = SamplingParams(max_tokens=1, temperature=0, **what)
        return llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], options, use_tqdm=False)
    score([tokens(200)])  # first use
    for what in ({"prompt_logprobs": 0}, {"logprobs": 5}):
        query = tokens(arguments.query_tokens)
        prompts = [query + tokens(arguments.item_tokens) for _ in range(arguments.items)]
        start = processor_seconds()
        outputs = score(prompts, **what)
        print(f"{what}: {processor_seconds() - start:.1f} s of processors, cached "
              f"{[output.num_cached_tokens for output in outputs][:3]} ...", flush=True)


if __name__ == "__main__":
    main()
