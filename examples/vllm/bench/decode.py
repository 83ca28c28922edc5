"""Whole decode steps of vLLM with its own attention and with the plugin's, in turn, for a model of few layers with random
weights.

decode.py [--dtype T] [--layers N] [--batches N,...] [--shared N,...] [--own N] [--rounds N] [--steps N]
One engine, whose layers change between the two, so that both read the same weights; each has prompts of its own. Of each
shape: the median step of a round, wall time and processor time; the ratio of the two, its median over rounds with a 95 %
interval; attention's share; and the time to the first tokens of all in the first run, of which the cache has what runs
before had.
"""
import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time

parser = argparse.ArgumentParser()
numbers = lambda text: [int(part) for part in text.split(",")]
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--hidden", type=int, default=4096, help="4,096 and --inner 14,336: the layers of an 8B model")
parser.add_argument("--inner", type=int, default=14336)
parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
parser.add_argument("--shared", type=numbers, default=[0, 1024, 4096])
parser.add_argument("--own", type=int, default=130, help="tokens of a prompt beside the shared ones; more than a block "
                    "of 128: the prefix cache has most of them in all rounds but the first")
parser.add_argument("--rounds", type=int, default=30, help="at least 6")
parser.add_argument("--steps", type=int, default=4)
arguments = parser.parse_args()
os.environ |= {"CHUNKATTN_VLLM": "on", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class Bench:
    def __init__(self, model):
        from chunkattn_vllm.backend import Impl
        from vllm import LLM

        self.layers, self.spent, self.count = [], 0.0, 0
        make, forward = Impl.__init__, Impl.forward

        def listed(layer, *args, **kwargs):
            make(layer, *args, **kwargs)
            self.layers.append((layer, layer.attention))

        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = forward(*args, **kwargs)
            self.spent += time.perf_counter() - start
            return result

        Impl.__init__, Impl.forward = listed, timed
        self.engine = LLM(
            model, load_format="dummy", skip_tokenizer_init=True, dtype=arguments.dtype, enforce_eager=True,
            enable_prefix_caching=True, max_num_seqs=max(arguments.batches),
            max_model_len=max(arguments.shared) + arguments.own + arguments.steps + 8).llm_engine
        if not self.layers or any(attention is None for _, attention in self.layers):
            raise SystemExit("the plugin is not in use")

    def run(self, plugin, batch, shared):
        """[step, its processor time, its attention, time to the first tokens of all], seconds"""
        from vllm import SamplingParams

        for layer, attention in self.layers:
            layer.attention = attention if plugin else None
        words = lambda count, *seed: random.Random(str((plugin, shared, *seed))).choices(range(3, 500), k=count)
        lengths = {}
        for i in range(batch):
            self.count += 1
            lengths[str(self.count)] = 0
            self.engine.add_request(
                str(self.count), {"prompt_token_ids": words(shared) + words(arguments.own, i)},
                SamplingParams(temperature=0, max_tokens=arguments.steps + 2, ignore_eos=True, detokenize=False))
        steps, start, first = [], time.perf_counter(), None
        while self.engine.has_unfinished_requests():
            decoding = all(lengths.values())
            self.spent, wall, processor = 0.0, time.perf_counter(), time.process_time()
            outputs = self.engine.step()
            if decoding and len(outputs) == batch:
                steps.append((time.perf_counter() - wall, time.process_time() - processor, self.spent))
            for output in outputs:
                lengths[output.request_id] = len(output.outputs[0].token_ids)
            if first is None and all(lengths.values()):
                first = time.perf_counter() - start
        return [statistics.median(column) for column in zip(*steps)] + [first]


def interval(ratios):
    """Their median, and the two of them between which it is in 95 % of cases or more, whatever their distribution."""
    ordered, n = sorted(ratios), len(ratios)
    beside = max((k for k in range(n // 2) if sum(math.comb(n, i) for i in range(k + 1)) <= 0.025 * 2**n), default=0)
    return f"{statistics.median(ordered):.3f} ({ordered[beside]:.3f}–{ordered[-1 - beside]:.3f})"


with tempfile.TemporaryDirectory() as folder:
    heads = arguments.hidden // 128
    with open(f"{folder}/config.json", "w") as file:
        json.dump(dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=512, hidden_act="silu",
                       hidden_size=arguments.hidden, intermediate_size=arguments.inner, head_dim=128,
                       num_hidden_layers=arguments.layers, num_attention_heads=heads, num_key_value_heads=heads // 4,
                       max_position_embeddings=8192, rms_norm_eps=1e-5, torch_dtype=arguments.dtype), file)
    bench = Bench(folder)
    print(f"{arguments.layers} layers, {arguments.dtype}, {arguments.own} own tokens; vLLM's own attention, then the plugin's\n"
          "| sequences, shared | step, ms | | processor time, ms | | attention, % | | first tokens, s | | "
          "ratio of steps | of processor time |\n" + "| --- " * 11 + "|", flush=True)
    for shared in arguments.shared:
        for batch in arguments.batches:
            cold = [bench.run(plugin, batch, shared) for plugin in (False, True)]
            rounds = []
            for i in range(arguments.rounds):
                ran = {plugin: bench.run(plugin, batch, shared) for plugin in (i % 2 == 1, i % 2 == 0)}
                rounds.append((ran[False], ran[True]))
            median = lambda side, what: statistics.median(r[side][what] for r in rounds)
            cells = [f"{1e3 * median(side, what):.1f}" for what in (0, 1) for side in (0, 1)]
            cells += [f"{100 * median(side, 2) / median(side, 0):.0f}" for side in (0, 1)]
            cells += [f"{run[3]:.2f}" for run in cold]
            cells += [interval([a[what] / b[what] for a, b in rounds]) for what in (0, 1)]
            print(f"| {batch}, {shared} | " + " | ".join(cells) + " |", flush=True)
