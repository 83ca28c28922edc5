"""The model of lm-evaluation-harness against its own `hf` model, on tasks in local files.

    python -m unittest test_lm_eval
"""

import contextlib
import io
import json
import logging
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import local_tasks
import models
import tokenizers
import torch
import transformers

try:
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    import chunkattn.lm_eval
    from chunkattn.lm_eval import ChunkAttnLM

    VERSION = lm_eval.__version__
except ModuleNotFoundError as error:
    VERSION = f"missing: {error} (pip install 'lm_eval[hf]')"

SEED = int(os.environ.get("CHUNKATTN_TEST_SEED", random.SystemRandom().randrange(2**31)))
QUESTIONS = 40
TEMPLATE = ("{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<s>assistant: {% endif %}")  # fmt: skip
logging.getLogger("lm_eval").setLevel(logging.ERROR)
logging.getLogger("chunkattn").setLevel(logging.ERROR)
print(f"seed {SEED} (CHUNKATTN_TEST_SEED), lm_eval {VERSION}, torch {torch.__version__}")


def words(draw, count):
    """A language of 300 words of which few are frequent."""
    letters = [[draw.choice("aeioubdkmnprst") for _ in range(draw.randrange(1, 8))] for _ in range(300)]
    return ["".join(letters[min(int(draw.expovariate(0.03)), 299)]) for _ in range(count)]


def tokenizer_of(text, size):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator([text], tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))  # fmt: skip
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)  # fmt: skip


def evaluate(lm, folder, tasks, **options):
    with contextlib.redirect_stderr(io.StringIO()):  # bars of progress
        return lm_eval.simple_evaluate(
            model=lm, tasks=tasks, task_manager=TaskManager(include_path=folder, include_defaults=False),
            log_samples=True, bootstrap_iters=0, **options)  # fmt: skip


def instances(pairs):
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


class Hook:
    """What lm-eval's cache of requests is told."""

    def __init__(self):
        self.told = {}

    def add_partial(self, kind, request, answer):
        self.told[kind, *map(str, request)] = answer


@unittest.skipIf("missing" in VERSION, f"lm_eval {VERSION}")
class LmEvalTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        draw = random.Random(SEED)
        cls.kept = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.kept.name)
        text = words(draw, 5000)
        local_tasks.write(cls.folder, text, QUESTIONS, example_words=190, seed=SEED)
        tokenizer = tokenizer_of(" ".join(text), 500)
        config = transformers.LlamaConfig(**models.COMMON | dict(vocab_size=len(tokenizer)), head_dim=64,
                                          bos_token_id=0, eos_token_id=1)  # fmt: skip
        models.make(config, SEED).save_pretrained(cls.folder / "model")
        tokenizer.save_pretrained(cls.folder / "model")
        cls.arguments = dict(pretrained=str(cls.folder / "model"), dtype="float32", device="cpu")
        cls.theirs = HFLM(**cls.arguments, batch_size=8)
        cls.ours = ChunkAttnLM(**cls.arguments, batch_size=8)

    @classmethod
    def tearDownClass(cls):
        cls.kept.cleanup()

    def check_answers(self, ours, theirs):
        self.assertEqual(len(ours), len(theirs))
        for (value, greedy), (expected, theirs_is_greedy) in zip(ours, theirs):
            self.assertAlmostEqual(value, expected, delta=1e-4)
            self.assertEqual(greedy, theirs_is_greedy)

    def compare(self, ours, theirs, tasks, folder=None, **options):
        """Runs tasks by both; returns the rows that were computed here."""
        before = ours.generator.stats["rows"]
        results = evaluate(ours, folder or self.folder, tasks, **options)
        rows = ours.generator.stats["rows"] - before
        expected = evaluate(theirs, folder or self.folder, tasks, **options)
        for task in tasks:
            for name, value in expected["results"][task].items():
                if isinstance(value, float):
                    self.assertAlmostEqual(results["results"][task][name], value, delta=1e-4 * max(1, abs(value)))
            pairs = list(zip(results["samples"][task], expected["samples"][task], strict=True))
            for mine, theirs in pairs:
                self.assertEqual(mine["arguments"], theirs["arguments"])
                for [mine], [theirs] in zip(mine["resps"], theirs["resps"], strict=True):
                    if isinstance(theirs, (str, float)):
                        mine, theirs = (mine, 0), (theirs, 0)
                    if isinstance(theirs[0], str):
                        self.assertEqual(mine, theirs)
                    else:
                        self.assertAlmostEqual(mine[0], theirs[0], delta=1e-4 * max(1, abs(theirs[0]) / 100))
                        self.assertEqual(mine[1], theirs[1])
            self.assertEqual(len(pairs), options.get("limit", QUESTIONS))
        return rows, results

    def test_choices(self):
        """40 questions behind five examples: accuracies and log-probabilities are hf's, the examples computed once."""
        rows, results = self.compare(self.ours, self.theirs, ["choices_same"])
        pairs = [self.ours._encode_pair(*request) for sample in results["samples"]["choices_same"]
                 for request in sample["arguments"]]  # fmt: skip
        self.assertEqual(len(pairs), 4 * QUESTIONS)
        common = os.path.commonprefix([context for context, _ in pairs])
        self.assertGreater(len(common), 1000)
        distinct = {tuple(text[: i + 1]) for context, continuation in pairs
                    for text in [(context + continuation)[:-1]] for i in range(len(text))}  # fmt: skip
        self.assertEqual(rows, len(distinct))
        self.assertGreater(min(len(continuation) for _, continuation in pairs), 2)

    def test_tasks(self):
        """Other shapes of tasks; some of the questions; another order of tasks."""
        tasks = ["letters_same", "rolling", "endings", "choices_anew", "letters_anew"]
        self.compare(self.ours, self.theirs, tasks, limit=7)

    def test_generation(self):
        self.compare(self.ours, self.theirs, ["generate"], limit=9)
        self.compare(self.ours, self.theirs, ["generate"], limit=3, gen_kwargs="max_gen_toks=20,until=o")

    def test_ends_of_generation(self):
        """Texts end where a stop sequence is complete, also the shorter ones of a batch; the rest is padding."""
        pad, decode = self.ours.tokenizer.pad_token_id, self.ours.tokenizer.decode
        for token in range(9, 99):  # until the long text does not have the short one's first token
            rows = [[7] * 40, [token] * 10]
            free = self.ours.generator.generate(rows, max_new_tokens=5, do_sample=False, eos_token_id=None)
            stop = decode(free[1].tokens[:1])
            if stop not in decode(free[0].tokens):
                break
        context = torch.tensor([rows[0], [pad] * 30 + rows[1]])
        mask = torch.tensor([[1] * 40, [0] * 30 + [1] * 10])
        got = self.ours._model_generate(context, 45, [stop], attention_mask=mask, eos_token_id=None).tolist()
        self.assertEqual(got[0], rows[0] + free[0].tokens)
        self.assertEqual(got[1], [pad] * 30 + rows[1] + free[1].tokens[:1] + [pad] * 4)

        def failing(tokenizer, stop, begin, batch):
            def criterion(ids, scores):
                raise RuntimeError("no criterion")

            return [criterion] if begin == 10 else []

        with unittest.mock.patch.object(chunkattn.lm_eval, "stop_sequences_criteria", failing):
            with self.assertRaisesRegex(RuntimeError, "no criterion"):
                self.ours._model_generate(context, 45, [stop], attention_mask=mask)
        self.assertFalse(self.ours.generator.num_live + self.ours.generator.num_waiting)

    def test_chat_template(self):
        tasks = ["choices_same", "generate"]
        rows, results = self.compare(self.ours, self.theirs, tasks, limit=3, apply_chat_template=True)
        self.assertIn("<s>user: Read:", results["samples"]["generate"][0]["arguments"][0][0])
        self.compare(self.ours, self.theirs, tasks, limit=3, apply_chat_template=True, fewshot_as_multiturn=False,
                     system_instruction="Be brief.")  # fmt: skip

    def test_max_length(self):
        """What is too long is truncated as hf does it, and texts for perplexities are cut into the same windows."""
        ours = ChunkAttnLM(**self.arguments, max_length=101, step_tokens=64)
        theirs = HFLM(**self.arguments, max_length=101)
        self.compare(ours, theirs, ["choices_anew", "rolling", "generate"], limit=5)
        text = "pad rab " * 200
        for length in (99, 100, 101, 102, 103):
            tokens = ours.tok_encode(text)[:length]
            for count in (1, 2, 50, length - 1):
                if count <= 101:
                    request = [(("a", "b"), tokens[:-count], tokens[-count:])]
                    self.check_answers(ours._loglikelihood_tokens(request, disable_tqdm=True),
                                       theirs._loglikelihood_tokens(request, disable_tqdm=True))  # fmt: skip
        with self.assertRaisesRegex(ValueError, "continuation = 102 tokens: expected at most max_length, 101"):
            ours._loglikelihood_tokens([(("a", "b"), tokens[:1], tokens[1:103])], True)

    def test_requests(self):
        """Contexts that are empty, end in spaces or begin with BOS; equal requests; continuations of nothing."""
        pairs = [("", " rab tok"), ("", "<s>rab"), ("rab ", "tok"), ("rab\n", " tok"), ("<s>rab", " tok"),
                 ("rab", " tok"), ("rab", " tok"), ("rab", " tok nat"), ("rab tok", " nat"),
                 ("rab", "tok")]  # fmt: skip
        hook, theirs = Hook(), Hook()
        # Its cache takes the wrong rows where one text is split at several places.
        reference = HFLM(**self.arguments, logits_cache=False)
        self.ours.set_cache_hook(hook), reference.set_cache_hook(theirs)
        ours = self.ours.loglikelihood(instances(pairs), disable_tqdm=True)
        self.check_answers(ours, reference.loglikelihood(instances(pairs), disable_tqdm=True))
        self.assertEqual(hook.told.keys(), theirs.told.keys())
        for (_, context, continuation), answer in hook.told.items():
            self.assertEqual(answer, ours[pairs.index((context, continuation))])
        self.assertEqual(self.ours._loglikelihood_tokens([(("a", ""), [5, 6], [])], True), [(0.0, True)])
        self.assertEqual(self.ours.loglikelihood([]), [])
        texts = [("rab tok nat",), ("",), ("rab",)]
        ours = self.ours.loglikelihood_rolling(instances(texts), disable_tqdm=True)
        for value, expected in zip(ours, self.theirs.loglikelihood_rolling(instances(texts), disable_tqdm=True)):
            self.assertAlmostEqual(value, expected, delta=1e-4)

    def test_arguments(self):
        for bad, said in (
            (dict(device="cuda:1"), "device = 'cuda:1': expected 'cpu'"),
            (dict(softmax_dtype="bfloat16"), "softmax_dtype = 'bfloat16': expected 'float32'"),
            (dict(mixed_precision_dtype="bfloat16"), "mixed_precision_dtype = 'bfloat16': expected none"),
            (dict(parallelize=True), "parallelize = True: expected none"),
            (dict(step_tokens=0), "step_tokens = 0: expected at least 1"),
        ):
            with self.assertRaisesRegex(ValueError, said):
                ChunkAttnLM(**self.arguments | bad)
        small = ChunkAttnLM(**self.arguments, batch_size="auto", max_batch_size=7, max_chunks=3,
                            softmax_dtype="float32")  # fmt: skip
        self.assertEqual(small.generator.max_chunks, 3)
        fits, too_long = ("x", [5] * 100, [6] * 28), ("x", [5] * 101, [6] * 28)
        self.check_answers(small._loglikelihood_tokens([fits], disable_tqdm=True),
                           self.theirs._loglikelihood_tokens([fits], disable_tqdm=True))  # fmt: skip
        before = small.generator.stats["rows"]
        with self.assertRaisesRegex(ValueError, "129 tokens: expected at most 128, what K/V memory has room for"):
            small._loglikelihood_tokens([fits, too_long], True)
        self.assertEqual(small.generator.stats["rows"], before)  # nothing is computed for an evaluation that will fail

    def test_command(self):
        """lm-eval's own command line, and what it writes."""
        out = self.folder / "out"
        command = [sys.executable, "-m", "chunkattn.lm_eval", "--model", "chunkattn", "--model_args",
                   f"pretrained={self.folder / 'model'},dtype=float32,step_tokens=100", "--tasks",
                   "choices_same,rolling", "--include_path", str(self.folder), "--limit", "3", "--batch_size", "auto",
                   "--log_samples", "--apply_chat_template", "--output_path", str(out)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"\|choices_same *\|.*\|acc ")
        [samples] = out.glob("*/samples_choices_same_*.jsonl")
        expected = evaluate(self.theirs, self.folder, ["choices_same"], limit=3, apply_chat_template=True)
        for line, theirs in zip(samples.read_text().splitlines(), expected["samples"]["choices_same"], strict=True):
            for [(value, _)], [(theirs, _)] in zip(json.loads(line)["resps"], theirs["resps"], strict=True):
                self.assertAlmostEqual(float(value), theirs, delta=1e-4)


if __name__ == "__main__":
    unittest.main()
