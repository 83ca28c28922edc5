#!/usr/bin/env python3
"""lm-eval's model `chunkattn` beside its `hf`: processor time and rows for the same requests.

    OMP_NUM_THREADS=1 python3 bench/pytorch/score.py --model SMOLLM2_FOLDER

Needs lm_eval. Tasks are made of the words of docs/*.md: five examples before each question, the same ones or drawn
for each; four choices of several tokens or of one; texts for perplexity. The modes take turns in one process on one
thread, --rounds times; the least time counts, and of hf its best batch size. Times are per question: hf may be given
the first --hf-questions alone, four times as many where they are short; and where questions share nothing, so is
chunkattn. `expanded` is transformers, the common beginning computed once and its cache expanded to each batch.
Log-probabilities are compared wherever two modes have them. What each mode took is told as soon as it is known.
"""

import argparse
import logging
import os
import pathlib
import resource
import sys
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples/pytorch/tests"))
import local_tasks
import lm_eval
import torch
import transformers
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from chunkattn import instruction_set
from chunkattn.lm_eval import ChunkAttnLM

# Of each task: ours / hf at most, ours / expanded at most.
GATES = {"choices_same": (1 / 12, 1 / 2), "letters_same": (1 / 6, None), "choices_anew": (0.4, None),
         "letters_anew": (1.0, None), "rolling": (1.0, None)}  # fmt: skip


def processor_time():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Requests(LM):
    """Computes nothing; keeps what lm-eval asks for."""

    def loglikelihood(self, requests):
        self.requests = requests
        return [(0.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests):
        self.requests = requests
        return [0.0] * len(requests)

    def generate_until(self, requests):
        raise NotImplementedError


class Counting(HFLM):
    rows = 0

    def _model_call(self, inps, *args, **arguments):
        self.rows += inps.numel()
        return super()._model_call(inps, *args, **arguments)


@torch.inference_mode()
def expanded(lm, requests, batch):
    """Answers, and rows that were computed."""
    pairs = [lm._encode_pair(*request.args) for request in requests]
    common = os.path.commonprefix([context[:-1] for context, _ in pairs])
    base, rows = lm.model(torch.tensor([common]), use_cache=True, logits_to_keep=1).past_key_values, len(common)
    answers, order = [None] * len(pairs), sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        texts = [(pairs[i][0] + pairs[i][1])[len(common) : -1] for i in part]
        width = max(map(len, texts))
        first = min(len(text) - len(pairs[i][1]) for text, i in zip(texts, part))
        cache = transformers.DynamicCache(config=lm.model.config)
        for layer, source in enumerate(base.layers):
            shape = (len(part), -1, -1, -1)
            cache.update(source.keys.expand(shape), source.values.expand(shape), layer)
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        logits = lm.model(ids, past_key_values=cache, logits_to_keep=width - first).logits.log_softmax(-1)
        rows += ids.numel()
        for j, i in enumerate(part):
            continuation = pairs[i][1]
            end = len(texts[j]) - first
            own = logits[j, end - len(continuation) : end]
            value = own.gather(1, torch.tensor(continuation)[:, None]).sum()
            answers[i] = (float(value), own.argmax(-1).tolist() == continuation)
    return answers, rows


def run(mode, lms, kind, requests):
    """(answers, rows, processor time) of one mode."""
    name, _, batch = mode.partition(" ")
    lm = lms[name]
    if name == "chunkattn":
        lm.generator.tree.clear()
        before = lm.generator.stats["rows"]
    elif name == "hf":
        lm.batch_size_per_gpu, lm.rows = int(batch), 0
    begin = processor_time()
    if name == "expanded":
        answers, rows = expanded(lm, requests, int(batch))
    else:
        answers = getattr(lm, kind)(requests, disable_tqdm=True)
        rows = lm.rows if name == "hf" else lm.generator.stats["rows"] - before
    spent = processor_time() - begin
    return [answer if isinstance(answer, tuple) else (answer, None) for answer in answers], rows, spent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a model of transformers and its tokenizer")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--hf-questions", type=int, default=200)
    parser.add_argument("--batches", default="1,4,8", help="of hf and expanded")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tasks", default=",".join(GATES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    folder = tempfile.TemporaryDirectory()
    words = " ".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))).split()
    local_tasks.write(folder.name, words, options.questions, passage_words=25, example_words=130)
    arguments = dict(pretrained=options.model, dtype="float32", device="cpu")
    hf = Counting(**arguments)
    ours = ChunkAttnLM(**arguments | dict(pretrained=hf.model), tokenizer=hf.tokenizer)
    lms = {"hf": hf, "expanded": hf, "chunkattn": ours}
    print(f"{options.model}, fp32, one thread; lm_eval {lm_eval.__version__}, transformers {transformers.__version__}, "
          f"torch {torch.__version__}, {instruction_set()}\n")  # fmt: skip
    print("| task | mode | questions | requests | rows / question | processor s / question | ours / its | at most |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    failed, begin = [], time.monotonic()
    for task in options.tasks.split(","):
        asked = Requests()
        lm_eval.simple_evaluate(model=asked, tasks=[task], bootstrap_iters=0, verbosity="ERROR",
                                task_manager=TaskManager(include_path=folder.name, include_defaults=False))  # fmt: skip
        kind, of_question = asked.requests[0].request_type, len(asked.requests) // options.questions
        few = min(options.hf_questions * (1 if task.startswith("choices") else 4), options.questions)
        modes = {"chunkattn": options.questions if task.endswith("same") else few}
        batches = options.batches.split(",")
        if GATES[task][1]:
            modes |= {f"expanded {batch}": options.questions for batch in batches}
        modes |= {f"hf {batch}": few for batch in batches}
        known, best, worst, greedy = {}, {}, 0.0, 0
        for turn in range(1, options.rounds + 1):
            for mode, questions in modes.items():
                answers, rows, spent = run(mode, lms, kind, asked.requests[: questions * of_question])
                best[mode] = min(best.get(mode, (float("inf"), 0)), (spent / questions, rows / questions))
                print(f"{time.monotonic() - begin:5.0f} s: {task}, {mode}, {turn}: {spent / questions:.3f} processor s and "
                      f"{rows / questions:.0f} rows for each of {questions} questions, "
                      f"{best['chunkattn'][0] / best[mode][0]:.3f}", file=sys.stderr, flush=True)  # fmt: skip
                for i, (value, is_greedy) in enumerate(answers):
                    before = known.setdefault(i, (value, is_greedy))
                    # Sums over hundreds of tokens have fewer digits behind the point.
                    scale = max(1, abs(value) / 100) if kind == "loglikelihood_rolling" else 1
                    worst = max(worst, abs(value - before[0]) / scale)
                    greedy += is_greedy != before[1]
        ours = best["chunkattn"][0]
        for mode, (spent, rows) in best.items():
            name, gate = mode.split()[0], ""
            if mode != "chunkattn" and spent == min(s for m, (s, _) in best.items() if m.startswith(name)):
                limit = GATES[task][name == "expanded"]
                gate = f"{limit:.3f}"
                if ours / spent > limit:
                    failed.append(f"{task}: {ours / spent:.3f} of {mode}'s time, expected at most {limit:.3f}")
            count = modes[mode]
            print(f"| {task} | {mode} | {count} | {count * of_question} | {rows:.0f} | {spent:.2f} | {ours / spent:.3f} | "
                  f"{gate} |", flush=True)  # fmt: skip
        print(f"| {task} | log-probabilities differ by at most {worst:.1e}, greedy flags of {greedy} | | | | | | |",
              flush=True)  # fmt: skip
        if worst > 1e-4 or greedy:
            failed.append(f"{task}: log-probabilities differ by {worst:.1e}, greedy flags of {greedy}")
    print("\n" + ("\n".join(failed) or "all within"))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
