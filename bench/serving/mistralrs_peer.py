#!/usr/bin/env python3
"""The load of `serve bench --rate 0` on mistral.rs, in one process by its Python package.

    pip install mistralrs
    python3 bench/serving/mistralrs_peer.py --model build/models/SmolLM2-135M-Instruct.Q4_1.gguf

Equal prompts of about --prompt-tokens tokens, --requests of them at once. mistral.rs keeps the
quantised weights of the file and multiplies by them; `serve` makes them bf16 first.
"""

import argparse
import concurrent.futures
import json
import pathlib
import time

from mistralrs import CompletionRequest, Runner, Which


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, type=pathlib.Path, help="a GGUF file")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--completion-tokens", type=int, default=64)
    options = parser.parse_args()
    which = Which.GGUF(
        tok_model_id=None,
        quantized_model_id=str(options.model.parent),
        quantized_filename=options.model.name,
    )
    runner = Runner(which=which, max_seqs=options.requests)
    words = "the river ran past an old stone mill and the miller counted every sack of grain ".split()
    prompt = " ".join(words[i % len(words)] for i in range(options.prompt_tokens))

    def ask(text, tokens):
        request = CompletionRequest(
            model="default", prompt=text, max_tokens=tokens, temperature=0.0
        )
        return runner.send_completion_request(request).usage

    ask("Once upon a time", 2)  # what is made once
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(options.requests) as pool:
        usages = list(
            pool.map(lambda _: ask(prompt, options.completion_tokens), range(options.requests))
        )
    seconds = time.perf_counter() - start
    generated = sum(usage.completion_tokens for usage in usages)
    report = {
        "requests": options.requests,
        "prompt_tokens": usages[0].prompt_tokens,
        "completion_tokens": generated / options.requests,
        "seconds": seconds,
        "tokens_per_second": generated / seconds,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
