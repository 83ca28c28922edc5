"""Generator.score() against transformers' own eager attention, each text alone.

    python -m unittest test_scoring
"""

import contextlib
import io
import os
import pathlib
import random
import threading
import unittest
import unittest.mock

import models
import torch
import transformers
from transformers import LogitsProcessor

import chunkattn
from chunkattn.transformers import Generator, Score, interface, scoring

SEED = int(os.environ.get("CHUNKATTN_TEST_SEED", random.SystemRandom().randrange(2**31)))
SCALE = int(os.environ.get("CHUNKATTN_TEST_SCALE", 1))
VOCABULARY = models.COMMON["vocab_size"]
print(f"seed {SEED} (CHUNKATTN_TEST_SEED), transformers {transformers.__version__}, torch {torch.__version__}")


class Tokenizer:
    """A token for each character, but one for 'ab', and spaces that go with what follows them."""

    def __call__(self, text, add_special_tokens=True):
        tokens, at = [1] if add_special_tokens else [], 0
        while at < len(text):
            pair = text[at : at + 2]
            joined = len(pair) == 2 and (pair == "ab" or (pair[0] == " " and pair[1] != " "))
            tokens.append(128 + ord(pair[1]) % 64 if joined else ord(pair[0]))
            at += 2 if joined else 1
        return transformers.BatchEncoding({"input_ids": tokens})


def alone(model, tokens):
    """The model's own log-probabilities, by its eager attention."""
    with interface.running(interface.configs_of(model), "eager"), torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)


class ScoringTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = models.make(transformers.LlamaConfig(**models.COMMON, head_dim=64), SEED)
        cls.known = {}

    def alone(self, tokens):
        key = tuple(tokens)
        if key not in self.known:
            self.known[key] = alone(self.model, tokens)
        return self.known[key]

    def check(self, prompt, continuation, score, tolerance=2e-4):
        self.assertIsNone(score.error)
        self.assertEqual(score.tokens, list(continuation))
        self.assertEqual(len(score.logprobs), len(continuation))
        self.assertAlmostEqual(score.sum, sum(score.logprobs), places=4)
        if not continuation:
            self.assertEqual((score.sum, score.is_greedy), (0, True))
            return
        rows = self.alone(list(prompt) + list(continuation)[:-1])[len(prompt) - 1 :]
        theirs = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        worst = float((torch.tensor(score.logprobs, dtype=torch.float64) - theirs).abs().max())
        self.assertLess(worst, tolerance)
        first, second = rows.topk(2).values.T
        if (first - second).min() > 2 * tolerance:
            self.assertEqual(score.is_greedy, rows.argmax(-1).tolist() == list(continuation))

    def greedy(self, prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.alone(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def pairs(self, draw):
        """Prompts that are beginnings of each other, or part anywhere; continuations that are prompts' next tokens."""
        few = draw.choice([2, 5, VOCABULARY])
        texts, pairs = [[draw.randrange(few) for _ in range(draw.randrange(1, 150))]], []
        for _ in range(draw.randrange(1, 6)):
            text = draw.choice(texts)
            text = text[: draw.randrange(len(text) + 1)]
            texts.append(text + [draw.randrange(few) for _ in range(draw.randrange(1, 80))])
        for _ in range(draw.randrange(1, 25)):
            text = draw.choice(texts)
            begin = draw.randrange(1, len(text) + 1)
            pairs.append((text[:begin], text[begin:][: draw.choice([0, 1, 1, 3, 9, 100])]))
            if draw.random() < 0.5:
                pairs[-1][1].append(draw.randrange(VOCABULARY))
            if draw.random() < 0.2:
                pairs.append((text[:begin], self.greedy(text[:begin], draw.randrange(1, 4))))
        draw.shuffle(pairs)
        return pairs

    def distinct(self, pairs):
        return len({tuple(text[: i + 1]) for prompt, continuation in pairs if continuation
                    for text in [prompt + continuation[:-1]] for i in range(len(text))})  # fmt: skip

    def test_random(self):
        """Any trie of texts, in little memory, in steps of any size, again and beside requests."""
        draw = random.Random(SEED)
        preempted = beside = 0
        for _ in range(10 * SCALE):
            pairs = self.pairs(draw)
            longest = max(len(prompt + continuation) for prompt, continuation in pairs)
            generator = Generator(
                self.model, step_tokens=draw.choice([1, 7, 64, 512]), max_sequences=draw.choice([1, 2, 7, 256]),
                max_chunks=longest // 64 + 2 + draw.choice([0, 2, 5, 100]), check=False)  # fmt: skip
            room = (generator.max_chunks - 1) * chunkattn.Tree.chunk_size
            for _ in range(2):
                requests = []
                for _ in range(draw.choice([0, 0, 1, 3])):
                    prompt = draw.choice(pairs)[0][: room // 2]
                    count = draw.randrange(1, min(200, room // 2) + 1)
                    requests.append(generator.submit(prompt, max_new_tokens=count, eos_token_id=None))
                with unittest.mock.patch.object(scoring, "PIECE", draw.choice([1, 1000, 1 << 23])):
                    scores = generator.score_many(pairs)
                generator.tree.check_invariants()
                for pair, score in zip(pairs, scores, strict=True):
                    self.check(*pair, score)
                for request in requests:
                    beside += len(request.tokens)
                    while not request.finished:
                        generator.step()
                    self.assertIsNone(request.error)
                    rows = self.alone(request.prompt + request.tokens[:-1])[len(request.prompt) - 1 :]
                    for token, row in zip(request.tokens, rows, strict=True):
                        self.assertGreater(row[token], row.max() - 1e-3)
            self.assertEqual(generator.num_live + generator.num_waiting, 0)
            self.assertEqual(generator.tree.stats()["live_sequences"], 0)
            preempted += generator.stats["preemptions"]
        print(f"{preempted} preemptions, {beside} tokens of requests beside", flush=True)

    def test_preemption(self):
        """Texts that lose their place to requests lose nothing that is known of them."""
        draw = random.Random(SEED)
        generator = Generator(self.model, max_chunks=9, step_tokens=3, check=False)
        prompts = [[draw.randrange(VOCABULARY) for _ in range(60)] for _ in range(2)]
        requests = [generator.submit(prompt, max_new_tokens=180, eos_token_id=None) for prompt in prompts]
        common = [draw.randrange(VOCABULARY) for _ in range(150)]
        pairs = [(common + [draw.randrange(VOCABULARY)] * n, [draw.randrange(9) for _ in range(draw.randrange(1, 60))])
                 for n in (1, 1, 1, 2, 2, 3, 40) for _ in range(8)]  # fmt: skip
        taken = []

        def preempt(at):
            taken.append(isinstance(generator._live[at], scoring.ScoredText))
            Generator._preempt(generator, at)

        with unittest.mock.patch.object(generator, "_preempt", preempt):
            scores = generator.score_many(pairs)
        self.assertIn(True, taken)
        for pair, score in zip(pairs, scores, strict=True):
            self.check(*pair, score)
        for request in requests:
            request.cancel()

    def test_rows(self):
        """What texts begin with alike is computed once; what is cached, where its logits are needed, again."""
        draw = random.Random(SEED)
        for step_tokens in (16, 512):
            prompt = [draw.randrange(VOCABULARY) for _ in range(200)]
            branch = [draw.randrange(VOCABULARY) for _ in range(5)]
            continuations = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7], [8], branch]
            generator = Generator(self.model, step_tokens=step_tokens, check=False)
            asked = 1 + 3 + 1 + 4  # behind the prompt: 1 2 3, 5 behind them, all but the last of the branch
            self.assertEqual(self.distinct([(prompt, c) for c in continuations]), 199 + asked)
            for expected in (199 + asked, asked, asked):
                before = generator.stats["rows"]
                logits, kept = [], scoring.take

                def counting(rows, values):
                    logits.append(len(values))
                    kept(rows, values)

                with unittest.mock.patch.object(scoring, "take", counting):
                    scores = generator.score(prompt, continuations)
                self.assertEqual(generator.stats["rows"] - before, expected)
                self.assertEqual(sum(logits), asked)  # and no others
                for continuation, score in zip(continuations, scores, strict=True):
                    self.check(prompt, continuation, score)
        questions = [prompt + [draw.randrange(VOCABULARY) for _ in range(30)] for _ in range(20)]
        pairs = [(question, [draw.randrange(VOCABULARY) for _ in range(4)]) for question in questions for _ in range(4)]
        generator = Generator(self.model, step_tokens=64, max_chunks=12, max_sequences=5, check=False)
        draw.shuffle(pairs)
        at_once = []
        scores = generator.score_many(
            pairs, progress=lambda _: at_once.append(generator.num_live + generator.num_waiting))  # fmt: skip
        self.assertEqual(max(at_once), 5)  # however many there are
        self.assertEqual(generator.stats["rows"], self.distinct(pairs))  # also where memory has room for few
        for pair, score in zip(pairs, scores, strict=True):
            self.check(*pair, score)

    def test_requests_that_join(self):
        """A request's tokens are chosen from its own logits, whatever is scored in the same steps."""
        draw = random.Random(SEED)
        generator, requests = Generator(self.model, step_tokens=40, max_sequences=8, check=False), []
        common = [draw.randrange(VOCABULARY) for _ in range(20)]
        pairs = [(common, [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 30))]) for _ in range(30)]

        def join(_):
            prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 20))]
            requests.append(generator.submit(prompt, max_new_tokens=3, eos_token_id=None))

        for pair, score in zip(pairs, generator.score_many(pairs, progress=join), strict=True):
            self.check(*pair, score)
        while generator.has_work:
            generator.step()
        self.assertGreater(len(requests), 5)
        for request in requests:
            rows = self.alone(request.prompt + request.tokens[:-1])[len(request.prompt) - 1 :]
            for token, row in zip(request.tokens, rows, strict=True):
                self.assertGreater(row[token], row.max() - 1e-3)

    def test_greedy(self):
        """One token that is not the most probable one is enough, wherever it is."""
        prompt = [3, 1, 4, 1, 5]
        generator, continuations = Generator(self.model, check=False), []
        for wrong in (None, 0, 1, 2):
            tokens = []
            for i in range(3):
                best = int(self.alone(prompt + tokens)[-1].argmax())
                tokens.append((best + 1) % VOCABULARY if i == wrong else best)
            continuations.append(tokens)
        scores = generator.score(prompt, continuations)
        self.assertEqual([score.is_greedy for score in scores], [True, False, False, False])

    def test_logits(self):
        """What logits say of any of their rows: of tokens that are equally probable the first is greedy."""
        draw = random.Random(SEED)
        for _ in range(60):
            count, vocabulary = draw.randrange(1, 30), draw.randrange(1, 12)
            logits = torch.tensor([[draw.randrange(3) for _ in range(vocabulary)] for _ in range(count)])
            at = draw.sample(range(count), draw.randrange(1, count + 1))
            if draw.random() < 0.5:
                at = list(range(min(at), max(at) + 1))
            batch, rows, all_asked = scoring.Batch(), {}, []
            for row in at:
                asked = [scoring.Asked(batch, [0], [draw.randrange(vocabulary)]) for _ in range(draw.randrange(1, 5))]
                rows[scoring.Row()] = row
                list(rows)[-1].targets = [(each, 0) for each in asked]
                all_asked += [(each, row) for each in asked]
            piece = draw.choice([1, 3 * vocabulary, 1 << 20])
            with unittest.mock.patch.object(scoring, "PIECE", piece), self.subTest(at=at, logits=logits, piece=piece):
                scoring.take(rows, logits.to(draw.choice([torch.float32, torch.bfloat16])))
                for asked, row in all_asked:
                    [token] = asked.score.tokens
                    [value] = asked.score.logprobs
                    self.assertAlmostEqual(value, float(logits[row].double().log_softmax(-1)[token]), places=5)
                    first = logits[row].tolist().index(max(logits[row].tolist()))
                    self.assertEqual(asked.score.is_greedy, token == first)
                    self.assertEqual(asked.missing, 0)
                self.assertEqual((batch.left, {row.targets for row in rows}), (0, {None}))

    def test_text(self):
        """Prompts and continuations that are text are split where lm-eval splits them."""
        generator, tokenizer = Generator(self.model, Tokenizer(), check=False), Tokenizer()
        for prompt, continuation, before in (
            ("xyz", "uv", "xyz"), ("xyz", " uv", "xyz"), ("xyz ", "uv", "xyz"), ("xyz\n ", "uv", "xyz"),
            ("xya", "bcd", "xya"), ("  ", "uv", "  "), ("xyz ", "", "xyz ")):  # fmt: skip
            with self.subTest(prompt=prompt, continuation=continuation):
                [score] = generator.score(prompt, [continuation])
                begin = tokenizer(before).input_ids
                expected = tokenizer(prompt + continuation).input_ids[len(begin) :] if continuation else []
                self.check(begin, expected, score)
        [score] = generator.score([5, 6, 7], ["ab"])
        self.check([5, 6, 7], [128 + ord("b") % 64], score)
        [score] = generator.score("xyz", [[9, 8]])
        self.check(tokenizer("xyz").input_ids, [9, 8], score)
        arrays = torch.arange(60).reshape(10, 2, 3)  # whose prompts are objects of a moment
        for (prompt, continuation), score in zip(arrays.tolist(), generator.score_many(arrays), strict=True):
            self.check(prompt, continuation, score)
        [score] = generator.score("xya", ["b"])
        self.assertRegex(str(score.error), "continuation = 'b': expected text that adds tokens")

    def test_page(self):
        """The program of docs/pytorch.md prints what stands there."""
        page = pathlib.Path(__file__).resolve().parents[3] / "docs" / "pytorch.md"
        text = page.read_text(encoding="utf-8").split("**Scores.**")[1]
        program, output = (text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "output"))
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(program, str(page), "exec"), {})
        self.assertEqual(said.getvalue(), output)

    def test_errors(self):
        """A pair that is refused says why, and the others are scored."""
        generator = Generator(self.model, max_chunks=6, check=False)
        good = ([1, 2, 3], [4, 5])
        for bad, said in (
            (([1, 2, 3], [4, VOCABULARY]), f"continuation = {VOCABULARY}: expected tokens from 0 to {VOCABULARY - 1}"),
            (([-1, 2, 3], [4]), "prompt = -1: expected tokens"),
            (([], [4]), "prompt = \\[\\]: expected one token"),
            (([1], None), "continuation = None: expected"),
            (([1], "text"), "continuation = text: expected token ids, or a Generator with a tokenizer"),
            (([1], [[2, 3], [4, 5]]), "continuation.shape = \\(2, 2\\): expected the tokens of one text"),
            (([1] * 300, [2] * 21), "prompt and continuation = 321 tokens: expected at most 320, what K/V memory"),
            (([1, 2, 3],), "pair = tuple: expected a prompt and a continuation"),
            ("ab", "pair = str: expected a prompt and a continuation"),
            (7, "pair = int: expected a prompt and a continuation"),
        ):  # fmt: skip
            with self.subTest(said):
                first, failed, last = generator.score_many([good, bad, good])
                self.check(*good, first)
                self.check(*good, last)
                self.assertRegex(str(failed.error), said)
                self.assertEqual((failed.tokens, failed.logprobs, failed.is_greedy), (None, None, None))
                with self.assertRaisesRegex(ValueError, said):
                    failed.sum
        self.check([1] * 300, [2] * 20, generator.score([1] * 300, [[2] * 20])[0])  # all the room there is
        self.assertEqual(generator.score_many([]), [])
        self.assertEqual(generator.score([1], []), [])
        self.assertEqual(generator.score([1], [[]]), [Score([], [], True)])
        told = []
        scores = generator.score_many([good, good, ([1], []), ([], [2])], progress=told.append)
        self.assertEqual((len(scores), sum(told), told[0]), (4, 4, 2))
        with self.assertRaisesRegex(ValueError, "prompt = \\[\\]: expected one token"):
            generator.score_many([good, ([], [2])], strict=True)
        for call, said in (
            (lambda: generator.score([], [[1]]), "prompt = \\[\\]"),
            (lambda: generator.score([1], "text"), "continuations = str: expected a list"),
            (lambda: generator.score([1], 7), "continuations = int: expected a list"),
            (lambda: generator.score([1], {"input_ids": [[1]]}), "continuations = dict: expected a list"),
            (lambda: generator.score([1], [[1]], tenant=-1), "tenant = -1: expected"),
            (lambda: generator.score_many([good], adapter=-1), "adapter = -1: expected"),
        ):
            with self.assertRaisesRegex(ValueError, said):
                call()
        config = transformers.LlamaConfig(**models.COMMON | dict(max_position_embeddings=30), head_dim=64)
        short = Generator(models.make(config, SEED), check=False)
        fits, too_long = short.score([1] * 20, [[2] * 11, [2] * 12])
        self.assertEqual(len(fits.logprobs), 11)
        self.assertRegex(str(too_long.error), "= 32 tokens: expected at most the model's 30 positions and one more")

    def test_where_it_fails(self):
        """What a step raises is raised, nothing stays behind, and the next call is as if there had been none."""
        generator = Generator(self.model, step_tokens=8, check=False)
        prompt, continuations = list(range(30)), [[1, 2], [1, 3], [4]]
        forward, calls = self.model.forward, []

        def failing(*args, **arguments):
            calls.append(1)
            if len(calls) == 3:
                raise MemoryError("no more")
            return forward(*args, **arguments)

        with unittest.mock.patch.object(self.model, "forward", failing), self.assertRaises(MemoryError):
            generator.score(prompt, continuations)
        self.assertEqual((generator.num_live, generator.num_waiting), (0, 0))
        for continuation, score in zip(continuations, generator.score(prompt, continuations), strict=True):
            self.check(prompt, continuation, score)

        class Calls(LogitsProcessor):
            def __call__(self, ids, scores):
                generator.score([1], [[2]])

        request = generator.submit([1, 2], max_new_tokens=2, logits_processor=[Calls()])
        while not request.finished:
            generator.step()
        self.assertRegex(str(request.error), "was called by what its own step calls")
        self.assertEqual((generator.num_live, generator.num_waiting), (0, 0))

    def test_threads(self):
        """Calls of several threads run in the same steps."""
        draw = random.Random(SEED)
        generator = Generator(self.model, step_tokens=20, max_chunks=9, check=False)
        jobs = [self.pairs(draw) for _ in range(4)]
        got = [None] * len(jobs)

        def run(i):
            got[i] = generator.score_many([(p[:200], c[:100]) for p, c in jobs[i]])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for pairs, scores in zip(jobs, got, strict=True):
            for (prompt, continuation), score in zip(pairs, scores, strict=True):
                self.check(prompt[:200], continuation[:100], score)

    def test_who_shares(self):
        """Tenants share nothing; those of one tenant do."""
        generator = Generator(self.model, check=False)
        prompt, rows = list(range(100)), []
        for where in ({"tenant": 1}, {"tenant": 2}, {"tenant": 1, "adapter": 1}, {"tenant": 2}):
            before = generator.stats["rows"]
            [score] = generator.score_many([(prompt, [1])], **where)
            self.check(prompt, [1], score)
            rows.append(generator.stats["rows"] - before)
        self.assertEqual(rows, [100, 100, 100, 1])

    def test_half_precision(self):
        """Log-probabilities are taken in float32, whatever logits are."""
        generator = Generator(models.make(self.model.config, SEED).bfloat16(), check=False)
        prompt = list(range(40))
        scores = generator.score(prompt, [[token] for token in range(VOCABULARY)])
        self.assertAlmostEqual(sum(torch.tensor([score.sum]).double().exp().item() for score in scores), 1, places=5)
        self.assertEqual(sum(score.is_greedy for score in scores), 1)
        best = max(range(VOCABULARY), key=lambda token: scores[token].sum)
        self.assertTrue(scores[best].is_greedy)

    def test_architectures(self):
        """Models with windows, soft caps and other heads; models without logits_to_keep."""
        draw = random.Random(SEED)
        for name, config in models.configurations():
            if name in ("gemma2", "gpt_oss", "deepseek_v3", "gpt2", "cohere"):
                with self.subTest(name):
                    self.check_model(models.make(config, SEED), draw)
        self.check_model(self.model, draw, keeps=False)

    def check_model(self, model, draw, keeps=True):
        generator = Generator(model, step_tokens=33, check=False)
        generator._keeps &= keeps
        prompt = [draw.randrange(VOCABULARY) for _ in range(70)]
        continuations = [[draw.randrange(VOCABULARY) for _ in range(5)] for _ in range(4)]
        for continuation, score in zip(continuations, generator.score(prompt, continuations), strict=True):
            rows = alone(model, prompt + continuation[:-1])[len(prompt) - 1 :]
            theirs = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
            self.assertLess(float((torch.tensor(score.logprobs).double() - theirs).abs().max()), 1e-3)


if __name__ == "__main__":
    unittest.main()
