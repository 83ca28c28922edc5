"""Greedy texts of a model, cold, then warm from the prefix cache, as JSON: one run of vLLM, stock or with the plugin.

texts.py MODEL OUT [--dtype T] [--blocks N] [--chunk N] [--random SEED]
"""
import argparse
import json
import os
import random

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("out")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--blocks", type=int, help="blocks of K/V: few of them mean preemption")
parser.add_argument("--chunk", type=int, help="query tokens of a step: few of them mean chunked prefill")
parser.add_argument("--block-size", type=int)
parser.add_argument("--tokens", type=int, default=24, help="of each text")
parser.add_argument("--random", type=int, help="a model without a tokenizer: prompts of random tokens")
parser.add_argument("--logprobs", action="store_true", help="and the logprob of each token, and the 5 likeliest")
parser.add_argument("--prompts", action="store_true", help="and the logprob of each token of the prompts")
parser.add_argument("--ngram", action="store_true", help="speculative decoding by what the text has had")
parser.add_argument("--process", action="store_true", help="the engine in a process of its own, as vLLM has it")
parser.add_argument("--quick", action="store_true", help="a cold run alone")
arguments = parser.parse_args()
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if arguments.process else "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main():
    from vllm import LLM, SamplingParams

    options = {"disable_log_stats": False, "enforce_eager": True, "dtype": arguments.dtype, "max_model_len": 1024, "enable_prefix_caching": True}
    if arguments.blocks:
        options["num_gpu_blocks_override"] = arguments.blocks
    if arguments.chunk:
        options |= {"max_num_batched_tokens": arguments.chunk, "enable_chunked_prefill": True}
    if arguments.ngram:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    if arguments.block_size:
        options["block_size"] = arguments.block_size
    if arguments.random is not None:
        options |= {"skip_tokenizer_init": True, "seed": arguments.random}
    llm = LLM(arguments.model, **options)

    numbers = random.Random(arguments.random or 0)
    if arguments.random is not None:
        words = lambda count: [numbers.randrange(3, 500) for _ in range(count)]
        system = words(300)
        prompts = [{"prompt_token_ids": system + words(length)} for length in (5, 40, 41, 130, 200, 1)]
        prompts += [{"prompt_token_ids": words(17)}, {"prompt_token_ids": prompts[0]["prompt_token_ids"] + words(150)}]
    else:
        system = " ".join(f"Rule {i}: a {a} {b} is never a {c}." for i, (a, b, c) in enumerate(zip(
            ("red", "small", "quiet", "tall", "green", "old") * 6, ("fox", "house", "river", "tree", "stone") * 7,
            ("dog", "barn", "lake", "bush") * 9)))
        prompts = [system + tail for tail in (" Tell me about foxes.", " What is a river?", " Name three colours:",
                                              " Once upon a time", " The capital of France is", " 1, 2, 3,")]
        prompts += ["The capital of Italy is", system[:700] + " In short:"]
    sampling = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True,
                              logprobs=5 if arguments.logprobs else None, detokenize=arguments.random is None)
    runs = []
    for _ in range(1 if arguments.quick else 2):
        outputs = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
        runs.append([{"ids": list(o.token_ids), "text": o.text,
                      "logprobs": [at[token].logprob for token, at in zip(o.token_ids, o.logprobs or [])],
                      "likeliest": [list(at) for at in o.logprobs or []]} for o in outputs])
    from chunkattn_vllm import statistics

    metrics = {metric.name: metric.value for metric in llm.get_metrics() if "chunkattn" in metric.name}
    result = {"runs": runs, "statistics": statistics(), "metrics": metrics}
    if arguments.prompts:
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
        result["prompts"] = [[at[token].logprob for token, at in zip(r.prompt_token_ids[1:], r.prompt_logprobs[1:])]
                             for r in llm.generate(prompts, sampling, use_tqdm=False)]
    with open(arguments.out, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":  # vLLM may start processes that import this
    main()
