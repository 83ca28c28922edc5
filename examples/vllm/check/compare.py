"""Stock vLLM and vLLM with the plugin: greedy texts must be the same, and faults leave vLLM as it is, with a message.

compare.py SMOLLM2 WORK [NAME...]: SMOLLM2 is the folder that smollm2.py makes; NAMEs choose of the cases below.
"""
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys

here = pathlib.Path(__file__).parent
smollm2, work = sys.argv[1], pathlib.Path(sys.argv[2])
RANDOM = ("llama", "llama_head_32", "llama_head_96", "qwen3", "mistral_window", "gemma2_cap_window", "gemma3_window",
          "gpt_oss_sinks_window", "bloom_alibi")
CASES = {
    "smollm2": [smollm2, "--logprobs", "--prompts"],
    "engine_process": [smollm2, "--process"],
    "chunked_prefill": [smollm2, "--chunk", "64"],
    "ngram": [smollm2, "--ngram"],
    "ngram_and_without": [smollm2, "--ngram"],
    "preemption": [str(work / "models" / "llama"), "--random", "3", "--block-size", "32", "--blocks", "36", "--tokens", "64"],
    "bfloat16": [smollm2, "--dtype", "bfloat16", "--logprobs", "--prompts", "--tokens", "8"],
    "float16": [smollm2, "--dtype", "float16", "--logprobs", "--prompts", "--tokens", "8"],
} | {name: [str(work / "models" / name), "--random", "3", "--logprobs"] for name in RANDOM}
ROUNDED = ("bfloat16", "float16")  # whose texts may part, where rounding decides between two tokens
LESS_EXACT = {"prompts": 1.2, "texts": 1.5}  # than stock vLLM, at most: of texts there are few logprobs
STOCK = {"ngram_and_without": [smollm2]}  # where stock vLLM runs otherwise
LEFT = {"llama_head_32": "config.head_dim = 32:"}  # why CPU_ATTN computes it
failed = []


def run(name, mode, arguments):
    out, log = work / f"{name}.{mode}.json", work / f"{name}.{mode}.log"
    with open(log, "w") as file:
        ended = subprocess.run([sys.executable, here / "texts.py", arguments[0], out, *arguments[1:]], stdout=file,
                               stderr=subprocess.STDOUT, timeout=900,
                               env={"OMP_WAIT_POLICY": "passive", "VLLM_LOG_STATS_INTERVAL": "1"} | os.environ | {"CHUNKATTN_VLLM": mode})
    text = log.read_text()
    if ended.returncode != 0:
        errors = [line for line in text.splitlines() if "Error" in line]
        return None, "\n".join(errors[-1:]) or text[-500:]
    return json.loads(out.read_text()), text


def expect(what, holds):
    print(f"{'ok' if holds else 'FAILED':6} {what}", flush=True)
    if not holds:
        failed.append(what)


def agreed(*texts):
    """How many tokens these texts begin with alike."""
    return len(os.path.commonprefix([text["ids"] for text in texts]))


@functools.cache
def float32():
    return run("smollm2", "off", CASES["smollm2"])


def rms(errors):
    return statistics.fmean(x * x for x in errors) ** 0.5


def rounded(name, stock, with_it):
    """Texts part as those of vLLM's check_logprobs_close may: each goes on with one of the other's likeliest tokens. And
    logprobs are about as near to those of float32 as stock vLLM's are."""
    exact, why = float32()
    if exact is None:
        return expect(f"{name}: stock vLLM in float32: {why}", False)
    strange, errors = 0, {kind: ([], []) for kind in LESS_EXACT}
    for a, b, e in zip(*(sum(side["runs"], []) for side in (stock, with_it, exact))):
        at = agreed(a, b)
        strange += at < len(a["ids"]) and (a["ids"][at] not in b["likeliest"][at] or b["ids"][at] not in a["likeliest"][at])
        for error, text in zip(errors["texts"], (a, b)):
            error += [x - y for x, y in zip(text["logprobs"], e["logprobs"][:agreed(a, b, e)])]
    for error, side in zip(errors["prompts"], (stock, with_it)):
        error += [x - y for given, e in zip(side["prompts"], exact["prompts"]) for x, y in zip(given, e)]
    expect(f"{name}: {strange} texts part by a token that is unlikely", strange == 0)
    for kind, most in LESS_EXACT.items():
        theirs, ours = (rms(error) for error in errors[kind])
        expect(f"{name}: {len(errors[kind][0])} logprobs of {kind} differ from float32's by {ours:.1e} (rms), stock vLLM's by "
               f"{theirs:.1e}: {ours / theirs:.2f} times as much, at most {most}", ours < most * theirs)


def compare(name, arguments):
    stock, why = float32() if name == "smollm2" else run(name, "off", STOCK.get(name, arguments))
    if stock is None:
        print(f"       {name}: stock vLLM does not run it: {why}", flush=True)
        return
    with_it, text = run(name, "on", arguments)
    if with_it is None:
        return expect(f"{name}: {text}", False)
    pairs = [(a, b) for ran in zip(stock["runs"], with_it["runs"]) for a, b in zip(*ran)]
    same = sum(a["ids"] == b["ids"] for a, b in pairs)
    logprobs = [(a["logprobs"], b["logprobs"][:agreed(a, b)]) for a, b in pairs]
    logprobs += zip(*(side.get("prompts", []) for side in (stock, with_it)))
    apart = max((abs(x - y) for a, b in logprobs for x, y in zip(a, b)), default=0.0)
    shared = with_it["statistics"]
    if name in ROUNDED:
        rounded(name, stock, with_it)
    if name == "engine_process":  # whose counters are seen here, in vLLM's metrics and in the log
        there = [line for line in text.splitlines() if "EngineCore" in line and "chunkattn is the attention" in line]
        logged = [line for line in text.splitlines() if "K/V blocks; without sharing" in line]
        expect(f"{name}: the plugin is in the engine's process: {bool(there)}; its metrics here are {with_it['metrics']}; "
               f"{len(logged)} lines in the log", there and logged and
               with_it["metrics"] == {f"vllm:chunkattn_{counter}": count for counter, count in shared.items()})
    expect(f"{name}: {same} of {len(pairs)} texts equal, logprobs within {apart:.1e}; {shared['pages_read']} blocks read, "
           f"{shared['pages_alone']} without sharing",
           (same == len(pairs) and apart < 1e-4 or name in ROUNDED) and
           ((name in LEFT and LEFT[name] in text and shared["steps"] == 0) or
            (name not in LEFT and shared["steps"] > 0 and
             (shared["pages_read"] < shared["pages_alone"] or name == "mistral_window"))))  # its first block is freed


def run_fault(name, mode="on"):
    ended = subprocess.run([sys.executable, here / "fault.py", name, smollm2], capture_output=True, text=True,
                           timeout=600, env=os.environ | {"CHUNKATTN_VLLM": mode})
    return ended.returncode == 0, ended.stdout + ended.stderr


def faults():
    """What is wrong is said, and vLLM's own attention is in place."""
    says = {"version": "vLLM 0.99.1: expected one of", "library": "expected libchunkattn_vllm.so",
            "c_version": "chunkattn_c_version() = ", "forward": "seq_lens[0] = -7: expected from 0"}
    for fault, text in says.items():
        ended, said = run_fault(fault)
        expect(f"fault {fault}: {text}...", ended and text in said)
        if failed and fault in failed[-1]:
            print(said[-500:], flush=True)
    notice = "engine core exited unexpectedly"  # vLLM's own
    (stock, text), (ours, with_it) = (run_fault("killed", mode) for mode in ("off", "on"))
    said = [[line for line in text.splitlines() if line.startswith("killed: ")] for text in (text, with_it)]
    expect(f"fault {' '.join(said[1])}, as of stock vLLM: {notice}",
           stock and ours and said[0] == said[1] and len(said[0]) == 1 and notice in text and notice in with_it)


work.mkdir(parents=True, exist_ok=True)
names = sys.argv[3:] or [*CASES, "faults"]
missing = {name for name in RANDOM if not (work / "models" / name).exists()}
if models := missing & {pathlib.Path(CASES[name][0]).name for name in names if name in CASES}:
    subprocess.run([sys.executable, here / "random_models.py", work / "models", *models], check=True)
for name in names:
    faults() if name == "faults" else compare(name, CASES[name])
sys.exit(f"FAILED: {len(failed)}" if failed else 0)
