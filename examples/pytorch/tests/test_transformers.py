"""Generator against transformers' own eager attention, each text alone.

    python -m unittest test_transformers

CHUNKATTN_MODELS: a folder with SmolLM2-135M-Instruct.Q4_1.gguf (`./dev model`), else it is left out.
"""

import contextlib
import gc
import io
import os
import pathlib
import random
import threading
import time
import unittest
import unittest.mock
import weakref

import models
import torch
import transformers
from transformers import LogitsProcessor, StoppingCriteria

import chunkattn
from chunkattn.transformers import Generator, Unsupported, interface

SEED = int(os.environ.get("CHUNKATTN_TEST_SEED", random.SystemRandom().randrange(2**31)))
print(f"seed {SEED} (CHUNKATTN_TEST_SEED), transformers {transformers.__version__}, torch {torch.__version__}")
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Recorder(LogitsProcessor):
    """Keeps what a text's tokens were chosen from."""

    def __init__(self):
        self.seen = []  # (tokens before, logits)

    def __call__(self, input_ids, scores):
        self.seen.append((input_ids[0].tolist(), scores[0].clone()))
        return scores


def alone(model, tokens):
    """The model's own logits of a text, by its eager attention."""
    with interface.running(interface.configs_of(model), "eager"), torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def check_logits(test, model, request, recorder, tolerance):
    """Each choice of a token; returns the largest difference, of the largest logit."""
    test.assertEqual(len(recorder.seen), sum(len(output.tokens) for output in request.outputs))
    worst = 0.0
    for output in request.outputs:
        text = request.prompt + output.tokens
        expected = alone(model, text[:-1])
        for before, logits in recorder.seen:
            if before != text[: len(before)] or len(before) >= len(text):
                continue
            theirs = expected[len(before) - 1]
            largest = float(expected.abs().max())
            worst = max(worst, float((logits - theirs).abs().max()) / largest)
            first, second = theirs.topk(2).values.tolist()
            if not request.sampler.samples and first - second > 2 * tolerance * largest:
                test.assertEqual(text[len(before)], int(theirs.argmax()))
    return worst


def run_all(generator):
    events = []
    while generator.has_work:
        events += generator.step()
        generator.tree.check_invariants()
    return events


class ArchitecturesTest(unittest.TestCase):
    def check(self, model, vocabulary, tolerance=1e-4, **options):
        """Eight requests that share prefixes: chunked prefill, decoding, forks, eviction."""
        draw = random.Random(f"{SEED} {model.config.model_type}")
        generator = Generator(model, step_tokens=50, max_chunks=13, max_sequences=6, **options)
        common = [draw.randrange(vocabulary) for _ in range(100)]
        branch = common[:70] + [draw.randrange(vocabulary) for _ in range(40)]
        requests = []

        def submit(prompt, **more):
            recorder = Recorder()
            requests.append((generator.submit(
                prompt, max_new_tokens=draw.randrange(4, 16), eos_token_id=None, logits_processor=[recorder],
                **more), recorder))  # fmt: skip

        for i in range(4):
            submit((common if i % 2 else branch)[: draw.randrange(60, 100)] + [i] * draw.randrange(1, 20))
        for _ in range(5):
            generator.step()
        submit(common + [9, 8, 7], n=3, do_sample=True, seed=draw.randrange(1000))
        submit([draw.randrange(vocabulary) for _ in range(300)])  # others' cache goes for it
        submit(branch)
        submit(common[:-1] + [3])
        run_all(generator)
        stats = generator.tree.stats()
        self.assertGreater(stats["evicted_tokens"], 0)
        self.assertGreater(stats["forks"], 0)
        self.assertGreater(stats["cached_tokens"] + stats["pending_tokens"], 0)
        self.assertEqual(stats["live_sequences"], 0)
        worst = max(check_logits(self, model, *each, tolerance) for each in requests)
        print(f"{model.config.model_type}: logits differ by at most {worst:.1e} of the largest", flush=True)
        self.assertLess(worst, tolerance)

    def test_architectures(self):
        for name, config in models.configurations():
            with self.subTest(name):
                self.check(models.make(config, SEED), config.vocab_size)

    def smollm2(self):
        folder = os.environ.get("CHUNKATTN_MODELS", "")
        if not os.path.exists(os.path.join(folder, SMOLLM2)):
            print(f"\nskipped: SmolLM2-135M, as there is no {SMOLLM2} in CHUNKATTN_MODELS ('{folder}'): ./dev model")
            self.skipTest("no model")
        return folder

    def test_readme(self):
        """The program of README.md runs as it stands there."""
        folder = self.smollm2()
        page = pathlib.Path(__file__).resolve().parents[1] / "README.md"
        program = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
        names, said = {}, io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(program.replace("build/models", folder), str(page), "exec"), names)
        for expected in ("Paris is", "Rome is", "0 sequences, ", "(cached)"):
            self.assertIn(expected, said.getvalue())

    def test_smollm2(self):
        folder = self.smollm2()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2, dtype=torch.float32)
        self.check(model.eval(), 5000)


class GeneratorTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = models.make(transformers.LlamaConfig(**models.COMMON, head_dim=64), SEED)

    def expected(self, prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(alone(self.model, tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def test_the_model_is_left_alone(self):
        before = self.model.config.to_dict()
        implementation = self.model.config._attn_implementation
        generator = Generator(self.model)
        generator.generate([[1, 2, 3]], max_new_tokens=3, eos_token_id=None)
        self.assertEqual(self.model.config.to_dict(), before)
        self.assertEqual(self.model.config._attn_implementation, implementation)
        ids = torch.tensor([[1, 2, 3]])
        theirs = self.model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)[0, 3:].tolist()
        self.assertEqual(theirs, self.expected([1, 2, 3], 3))

    def test_preemption(self):
        """More texts than K/V memory has room for: all come out as if alone."""
        draw = random.Random(SEED)
        prompts = [[draw.randrange(200) for _ in range(60)] for _ in range(6)]
        generator = Generator(self.model, max_chunks=7, step_tokens=64)
        requests = generator.generate(prompts, max_new_tokens=80, eos_token_id=None)
        self.assertGreater(generator.stats["preemptions"], 0)
        stats = generator.tree.stats()
        self.assertEqual(stats["preempted_inserts"], generator.stats["preemptions"])
        self.assertEqual(stats["prompt_tokens"], 6 * 60)
        for request in requests:
            recorder = alone(self.model, request.prompt + request.tokens[:-1])[len(request.prompt) - 1 :]
            top = recorder.topk(2).values
            sure = (top[:, 0] - top[:, 1]) > 2e-4 * recorder.abs().max()
            self.assertTrue((recorder.argmax(-1)[sure] == torch.tensor(request.tokens)[sure]).all())

    def test_max_sequences(self):
        """Of forks, too."""
        generator = Generator(self.model, max_sequences=3)
        request = generator.submit([1, 2, 3], n=8, max_new_tokens=5, eos_token_id=None, do_sample=True, seed=1)
        most = 0
        while generator.has_work:
            generator.step()
            most = max(most, generator.num_live)
        self.assertEqual(most, 3)
        self.assertEqual([len(output.tokens) for output in request.outputs], [5] * 8)

    def test_cancelling(self):
        generator = Generator(self.model, step_tokens=4)
        first = generator.submit(range(1, 30), max_new_tokens=50, eos_token_id=None)
        second = generator.submit(range(1, 40), max_new_tokens=5, eos_token_id=None, n=2)
        waiting = generator.submit(range(50), max_new_tokens=5)
        generator.step()
        first.cancel()  # it was to compute what the second waits for
        waiting.cancel()
        events = run_all(generator)
        self.assertEqual([first.outputs[0].finish_reason, waiting.outputs[0].finish_reason], ["cancelled"] * 2)
        self.assertEqual([output.finish_reason for output in second.outputs], ["length"] * 2)
        self.assertEqual(second.outputs[1].tokens, second.tokens)
        self.assertEqual([e.finish_reason for e in events if e.request is first], ["cancelled"])
        self.assertEqual(generator.step(), [])

    def test_streaming(self):
        class Streamer:
            def __init__(self):
                self.got, self.ended = [], 0

            def put(self, value):
                self.got += value.flatten().tolist()

            def end(self):
                self.ended += 1

        streamer, prompt = Streamer(), [5, 6, 7, 8]
        generator = Generator(self.model)
        request = generator.submit(prompt, max_new_tokens=6, eos_token_id=None, streamer=streamer)
        tokens = list(generator.stream(prompt, max_new_tokens=6, eos_token_id=None))
        self.assertEqual(tokens, request.tokens)
        self.assertEqual((streamer.got, streamer.ended), (prompt + tokens, 1))
        stream = generator.stream(prompt, max_new_tokens=60, eos_token_id=None)
        next(stream)
        stream.close()
        self.assertEqual((generator.num_live, generator.num_waiting), (0, 0))

    def test_ends(self):
        prompt = [9, 8, 7]
        text = self.expected(prompt, 6)
        generator = Generator(self.model)
        stop = text[3]
        expected = text[: text.index(stop) + 1]
        request, = generator.generate([prompt], max_new_tokens=6, eos_token_id=[210, stop])
        self.assertEqual((request.tokens, request.outputs[0].finish_reason), (expected, "stop"))

        class Two(StoppingCriteria):
            def __call__(self, input_ids, scores, **_):
                return torch.tensor([input_ids.shape[1] >= 5])

        request, = generator.generate([prompt], max_new_tokens=6, eos_token_id=None, stopping_criteria=[Two()])
        self.assertEqual((request.tokens, request.outputs[0].finish_reason), (text[:2], "stop"))
        request, = generator.generate([prompt], max_length=5, eos_token_id=None)
        self.assertEqual((request.tokens, request.outputs[0].finish_reason), (text[:2], "length"))
        request, = generator.generate([prompt], eos_token_id=None)
        self.assertEqual(len(request.tokens), 20)  # transformers' default

    def test_sampling(self):
        """As transformers' processors say, one row or many at once, and again with the same seed."""
        options = dict(do_sample=True, temperature=1.5, top_k=3, eos_token_id=None, max_new_tokens=8)
        generator = Generator(self.model)
        prompts = [[i, 2, 3] for i in range(6)]
        requests = generator.generate(prompts, seed=7, **options)
        for request in requests:
            logits = alone(self.model, request.prompt + request.tokens[:-1])[2:]
            for row, token in zip(logits, request.tokens):
                self.assertIn(token, row.topk(3).indices.tolist())
        again = [generator.generate([prompt], seed=7, **options)[0].tokens for prompt in prompts]
        self.assertEqual([request.tokens for request in requests], again)
        request, = generator.generate([[1, 2, 3]], seed=7, n=4, **options)
        self.assertGreater(len({tuple(output.tokens) for output in request.outputs}), 1)
        config = transformers.GenerationConfig(max_new_tokens=8, repetition_penalty=1e9, eos_token_id=None)
        request, = generator.generate([[1, 2, 3]], config)
        self.assertEqual(len(set(request.prompt + request.tokens)), 11)
        request, = generator.generate([[1, 2, 3]], max_new_tokens=4, eos_token_id=None,
                                      prefix_allowed_tokens_fn=lambda *_: [50, 51])  # fmt: skip
        self.assertLessEqual(set(request.tokens), {50, 51})

    def test_tenants(self):
        generator = Generator(self.model)
        prompt = list(range(100))
        cached = [generator.generate([prompt], max_new_tokens=1, tenant=tenant)[0].cached_tokens
                  for tenant in (0, 1, 0)]  # fmt: skip
        self.assertEqual(cached, [0, 0, 99])

    def test_types(self):
        for dtype in (torch.bfloat16, torch.float16):
            model = models.make(transformers.LlamaConfig(**models.COMMON, head_dim=64), SEED).to(dtype)
            try:
                generator = Generator(model)
            except ValueError as error:
                if "was built with" not in str(error):
                    raise
                print(f"\nskipped: K/V of {dtype}, which this build has no kernels for")
                continue
            request, = generator.generate([list(range(70))], max_new_tokens=4, eos_token_id=None)
            self.assertEqual(len(request.tokens), 4)

    def test_requests_that_are_refused(self):
        generator = Generator(self.model, max_chunks=4)
        for expected, options in (
            ("'beam_search'", dict(num_beams=2)), ("guidance_scale", dict(guidance_scale=2.0)),
            ("num_return_sequences = 2: expected none, see n", dict(num_return_sequences=2, do_sample=True)),
            ("output_scores", dict(output_scores=True)),
            ("n = 0", dict(n=0)), ("n = 1.5", dict(n=1.5)), ("n = True", dict(n=True)), ("strange", dict(strange=1)),
            ("tenant = -1", dict(tenant=-1)), ("tenant = 'a'", dict(tenant="a")), ("adapter = ", dict(adapter=1 << 63)),
            ("priority = ", dict(priority=1 << 31)), ("seed = 1.5", dict(seed=1.5)), ("seed = ", dict(seed=1 << 70)), ("max_length = 1004", dict(max_new_tokens=1000)),
            ("max_length = 2", dict(max_length=2)), ("temperature", dict(do_sample=True, temperature=-1.0)),
        ):  # fmt: skip
            with self.subTest(expected), self.assertRaisesRegex(ValueError, expected):
                generator.submit([1, 2, 3, 4], **options)
        for prompt in ([], [211], [-1], "text", [1.5]):
            with self.subTest(prompt), self.assertRaisesRegex(ValueError, "prompt = "):
                generator.submit(prompt)
        with self.assertRaisesRegex(ValueError, "max_length = 4098: expected at most the model's 4096"):
            Generator(self.model).submit([1], max_length=4098)
        self.assertEqual(generator.num_waiting, 0)

    def test_prompts(self):
        class Tokenizer:
            def __call__(self, text):
                return transformers.BatchEncoding({"input_ids": [ord(letter) for letter in text]})

        generator = Generator(self.model, Tokenizer())
        expected = self.expected([65, 66], 2)
        options = dict(max_new_tokens=2, eos_token_id=None)
        ids = torch.tensor([[65, 66]])
        padded = {"input_ids": torch.tensor([[0, 65, 66], [1, 65, 66]]), "attention_mask": torch.tensor([[0, 1, 1]] * 2)}
        for prompts in (["AB"], [[65, 66]], ids, [ids], [ids[0]], [ids[0].numpy()], [ids.int()], [],
                        {"input_ids": ids}, padded, [{"input_ids": ids}], transformers.BatchEncoding({"input_ids": ids})):  # fmt: skip
            requests = generator.generate(prompts, **options)
            self.assertEqual([request.tokens for request in requests], [expected] * len(requests))
            self.assertEqual(len(requests), 2 if prompts is padded else len(prompts) and 1)
        for prompt in ([], [211], [-1], "", [1.5], None, 7, [[1, 2], [3, 4]], ["a"], [True], [None], [2**70],
                       torch.zeros(2, 3).long(), torch.ones(3).bool(), torch.zeros(3), torch.zeros(3, device="meta").long(),
                       {"ids": [1]}, {"input_ids": [1, 2], "attention_mask": [0, 1]}, object()):  # fmt: skip
            with self.subTest(prompt), self.assertRaisesRegex(ValueError, "^prompt"):
                generator.submit(prompt)
        for prompt, said in (([], r"prompt = \[\]: expected one token"), (None, "prompt = None: expected text or a list"),
                             ({"input_ids": None}, "prompt = None"), ("", r"prompt = \[\]")):  # fmt: skip
            with self.subTest(prompt), self.assertRaisesRegex(ValueError, "^" + said):
                generator.submit(prompt)
        for prompts, said in ((None, "prompts = None"), (7, "prompts = int"), ({"input_ids": None}, "prompts = None"),
                              ({"input_ids": [1, 2], "attention_mask": [1, 1]}, "prompts = list"),
                              ([None], "prompt = None"), ([[]], r"prompt = \[\]")):  # fmt: skip
            with self.subTest(prompts), self.assertRaisesRegex(ValueError, f"^{said}: expected"):
                generator.generate(prompts)
        with self.assertRaisesRegex(ValueError, "^prompts = text"):
            generator.generate("AB")
        with self.assertRaisesRegex(ValueError, r"^prompt.shape = \(\)"):
            generator.generate([[1, 2], 3])
        self.assertFalse(generator.has_work)

    def test_what_fails_is_one_request_alone(self):
        """Processors, criteria and streamers that raise; the others go on, sampled as if alone."""

        class Fails(LogitsProcessor):
            def __call__(self, input_ids, scores):
                if input_ids.shape[1] == 5:
                    raise KeyError("of the user's")
                return scores

        class FailsToStop(StoppingCriteria):
            def __call__(self, input_ids, scores, **_):
                raise KeyError("of the user's")

        class Broken:
            def put(self, value):
                if value.dim() == 1:
                    raise KeyError("of the user's")

            def end(self):
                raise OSError("pipe")

        class Shapeless(LogitsProcessor):
            def __call__(self, input_ids, scores):
                return None

        class Nan(LogitsProcessor):
            def __call__(self, input_ids, scores):
                return scores * torch.nan

        sampled = dict(max_new_tokens=6, eos_token_id=None, do_sample=True, seed=3)
        alone_text = Generator(self.model).generate([[1, 2, 3, 4]], **sampled)[0].tokens
        for bad, raised in (
            (dict(logits_processor=[Fails()]), KeyError), (dict(stopping_criteria=[FailsToStop()]), KeyError),
            (dict(streamer=Broken()), KeyError), (dict(logits_processor=[Shapeless()]), ValueError),
            (dict(logits_processor=[Nan()], do_sample=True), RuntimeError), (dict(logits_processor=[Fails()], n=3), KeyError),
        ):  # fmt: skip
            with self.subTest(bad):
                generator = Generator(self.model)
                options = dict(max_new_tokens=8, eos_token_id=None) | bad
                failing = generator.submit([1, 2, 3], **options)
                good = generator.submit([1, 2, 3, 4], **sampled)
                events = run_all(generator)
                self.assertIsInstance(failing.error, raised)
                self.assertEqual({output.finish_reason for output in failing.outputs}, {"error"})
                self.assertEqual((failing.finish_reason, good.finish_reason), ("error", "length"))
                self.assertEqual(sum(e.finish_reason == "error" for e in events), len(failing.outputs))
                self.assertEqual(good.tokens, alone_text)
                self.assertIsNone(good.error)
                with self.assertRaises(raised):
                    generator.generate([[1, 2, 3], [1, 2]][: 1 if "streamer" in bad else 2], **options)
                self.assertFalse(generator.has_work)
                with self.assertRaises(raised):
                    list(generator.stream([1, 2, 3], **options | ({"n": 1} if "n" in bad else {})))
                self.assertEqual(generator.tree.stats()["live_sequences"], 0)

    def test_calls_from_within_a_step(self):
        """A processor that cancels, submits, and steps."""
        generator = Generator(self.model)
        more = []

        class Meddles(LogitsProcessor):
            def __call__(self, input_ids, scores):
                if input_ids.shape[1] == 5:
                    first.cancel()
                    more.append(generator.submit([7, 8], max_new_tokens=3, eos_token_id=None))
                    second.cancel()
                    try:
                        generator.step()
                    except RuntimeError as error:
                        more.append(str(error))
                return scores

        first = generator.submit([1, 2, 3], max_new_tokens=9, eos_token_id=None, logits_processor=[Meddles()])
        second = generator.submit([4, 5], max_new_tokens=9, eos_token_id=None, n=2)
        run_all(generator)
        self.assertEqual([first.outputs[0].finish_reason, second.outputs[1].finish_reason], ["cancelled"] * 2)
        self.assertEqual(len(first.tokens), 3)
        self.assertIn("by what its own step calls", more[1])
        self.assertEqual(more[0].tokens, self.expected([7, 8], 3))

    def test_threads(self):
        """Two generators on one model, each called by two threads; a third cancels."""
        generators = [Generator(self.model, max_chunks=40, step_tokens=30) for _ in range(2)]
        draw = random.Random(SEED)
        common = [draw.randrange(200) for _ in range(40)]
        wrong = []

        def work(number, generator):
            try:
                for i in range(4):
                    prompt = common + [number, i]
                    request, = generator.generate([prompt], max_new_tokens=5, eos_token_id=None)
                    text = prompt + request.tokens
                    logits = alone(self.model, text[:-1])[len(prompt) - 1 :]
                    top = logits.topk(2).values
                    sure = (top[:, 0] - top[:, 1]) > 2e-4 * logits.abs().max()
                    if not (logits.argmax(-1)[sure] == torch.tensor(request.tokens)[sure]).all():
                        wrong.append((prompt, request.tokens))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i, generators[i % 2])) for i in range(4)]
        for thread in threads:
            thread.start()
        cancelled = []
        while any(thread.is_alive() for thread in threads):
            cancelled.append(generators[0].submit(common + [199], max_new_tokens=50, eos_token_id=None))
            time.sleep(0.002)
            cancelled[-1].cancel()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])
        run_all(generators[0])
        self.assertEqual({request.outputs[0].finish_reason for request in cancelled}, {"cancelled"})
        self.assertEqual(self.model.config._attn_implementation, "eager")

    def test_generators_that_are_dropped(self):
        """Not drained, with a stream that was begun: memory is freed at once, handles stay harmless."""
        gc.collect()
        gc.disable()
        try:
            generator = Generator(self.model)
            request = generator.submit(range(1, 30), max_new_tokens=50, eos_token_id=None, n=2)
            generator.step()
            tree = weakref.ref(generator)
            del generator
            self.assertIsNone(tree())
            request.cancel()
            generator = Generator(self.model)
            stream = generator.stream(range(1, 30), max_new_tokens=50, eos_token_id=None)
            next(stream)
            del stream
            self.assertEqual((generator.num_live, generator.num_waiting), (0, 0))
        finally:
            gc.enable()

    def test_events(self):
        """step() reports what was submitted; generate() and stream() leave nothing in it."""
        generator = Generator(self.model)
        request = generator.submit([1, 2], max_new_tokens=3, eos_token_id=None)
        self.assertIsNone(request.finish_reason)
        generator.generate([[3, 4]], max_new_tokens=6, eos_token_id=None)
        self.assertTrue(generator.has_work)
        events = generator.step()
        self.assertEqual([(e.request, e.token) for e in events], [(request, token) for token in request.tokens])
        self.assertFalse(generator.has_work)

    def test_no_room(self):
        """Where others hold the K/V memory, a step says so instead of waiting forever."""
        generator = Generator(self.model, max_chunks=3)
        other = generator.tree.insert(range(150))
        with self.assertRaisesRegex(RuntimeError, "no room for request 1: 0 of 3 chunks are free"):
            generator.generate([[1, 2, 3]], max_new_tokens=3, eos_token_id=None)
        del other
        self.assertEqual(len(generator.generate([[1, 2, 3]], max_new_tokens=3, eos_token_id=None)[0].tokens), 3)

class WrappersTest(unittest.TestCase):
    """Models that torch.compile() or PEFT has wrapped."""

    def setUp(self):
        self.model = models.make(transformers.LlamaConfig(**models.COMMON, head_dim=64), SEED)
        self.prompt, self.options = list(range(5, 40)), dict(max_new_tokens=5, eos_token_id=None)
        self.expected = Generator(self.model).generate([self.prompt], **self.options)[0].tokens

    def test_compiled(self):
        """In whole, in place, in part, by its function: a step runs Python, all other calls what was compiled."""
        compiled = []

        def backend(graph, inputs):
            compiled.append(graph)
            return graph.forward

        def in_part(model):
            model.model = torch.compile(model.model, backend=backend)

        def by_function(model):
            model.forward = torch.compile(model.forward, backend=backend)

        for name, wrap in (("whole", lambda model: torch.compile(model, backend=backend)),
                           ("in place", lambda model: model.compile(backend=backend)),
                           ("part", in_part), ("function", by_function)):  # fmt: skip
            with self.subTest(name):
                model = models.make(transformers.LlamaConfig(**models.COMMON, head_dim=64), SEED)
                outer = wrap(model)
                outer = model if outer is None else outer
                compiled.clear()
                generator = Generator(outer)
                request, = generator.generate([self.prompt], **self.options)
                self.assertEqual(request.tokens, self.expected)
                self.assertEqual(compiled, [])
                with torch.inference_mode():
                    outer(input_ids=torch.tensor([self.prompt]), use_cache=False)
                self.assertGreater(len(compiled), 0)
                torch.compiler.reset()

    def test_compiled_while_it_runs(self):
        """Between steps, and while another one fails."""
        generator = Generator(self.model)
        request = generator.submit(self.prompt, **self.options)
        generator.step()
        self.model.compile(backend=lambda graph, inputs: self.fail("compiled"))
        run_all(generator)
        self.assertEqual(request.tokens, self.expected)

    def test_adapters(self):
        """A stand-in for PEFT's wrapper: adapters within layers count, others are refused."""

        class Adapter:
            is_prompt_learning = False

        class Peft(torch.nn.Module):
            def __init__(self, model):
                super().__init__()
                self.base_model, self.peft_config = model, {"a": Adapter()}

            def get_base_model(self):
                return self.base_model

            def forward(self, *args, **options):
                return self.base_model(*args, **options)

        wrapped = Peft(self.model).eval()
        for outer in (wrapped, torch.compile(wrapped), Peft(torch.compile(self.model)).eval()):
            generator = Generator(outer)
            self.assertIs(generator.model, self.model)
            self.assertEqual(generator.generate([self.prompt], **self.options)[0].tokens, self.expected)
        with self.assertRaisesRegex(ValueError, "model.training = True"):
            Generator(Peft(self.model))
        for name, value in (("is_prompt_learning", True), ("alora_invocation_tokens", [1, 2])):
            wrapped.peft_config = {"a": Adapter(), "b": Adapter()}
            setattr(wrapped.peft_config["b"], name, value)
            with self.assertRaisesRegex(Unsupported, r"Peft: its adapter 'b' \(Adapter\) depends on the text"):
                Generator(wrapped.eval())

    def test_peft(self):
        try:
            import peft
        except ImportError as error:
            print(f"\nskipped: PEFT's own wrappers, of which there is a stand-in ({error})")
            self.skipTest("no peft")
        lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj", "embed_tokens"],
                               lora_alpha=64, init_lora_weights=False)  # fmt: skip
        model = peft.get_peft_model(self.model, lora).eval()
        request, = Generator(model).generate([self.prompt], **self.options)
        theirs = model.generate(input_ids=torch.tensor([self.prompt]), do_sample=False, **self.options)
        self.assertEqual(request.prompt + request.tokens, theirs[0].tolist())
        self.assertNotEqual(request.tokens, self.expected)
        tuned = peft.get_peft_model(models.make(self.model.config, SEED), peft.PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3))  # fmt: skip
        with self.assertRaisesRegex(Unsupported, "PrefixTuningConfig.*depends on the text as a whole"):
            Generator(tuned.eval())


class RefusalsTest(unittest.TestCase):
    def refused(self, model, reason):
        with self.assertRaisesRegex(Unsupported, reason):
            Generator(model.eval())

    def test_models_that_are_refused(self):
        t, small = transformers, dict(vocab_size=211, hidden_size=32, num_hidden_layers=2)
        self.refused(t.T5ForConditionalGeneration(t.T5Config(
            vocab_size=211, d_model=32, num_layers=1, num_heads=2, d_kv=16, d_ff=32)), "encoder-decoder")  # fmt: skip
        self.refused(t.MambaForCausalLM(t.MambaConfig(**small, state_size=8)), "position_ids")
        unnamed = models.make(models.hybrid(["full_attention"] * 2), SEED)
        unnamed.config.layer_types = None  # of a class that may have states, whose layers may be of any kind
        self.refused(unnamed, "GraniteMoeHybridForCausalLM has recurrent layers")
        self.refused(t.LlamaModel(t.LlamaConfig(**models.COMMON)), "no logits")
        bloom = t.BloomConfig(vocab_size=211, hidden_size=32, n_layer=1, n_head=2)
        self.refused(t.BloomForCausalLM(bloom), "position_ids")
        chunked = t.Llama4TextConfig(**models.COMMON | dict(num_hidden_layers=4), attention_chunk_size=16,
                                     intermediate_size_mlp=32, num_local_experts=2, head_dim=16)  # fmt: skip
        self.refused(t.Llama4ForCausalLM(chunked), "attn_temperature_tuning")
        chunked.attn_temperature_tuning = False
        self.refused(t.Llama4ForCausalLM(chunked), "neither causal nor a causal window")

        def needs_mask(module, args, named):
            named["attention_mask"].shape

        needy = models.make(t.LlamaConfig(**models.COMMON), SEED)
        needy.model.layers[1].register_forward_pre_hook(needs_mask, with_kwargs=True)
        self.refused(needy, "does not run without masks, over one row of two texts: AttributeError")
        large = t.LlamaConfig(**models.COMMON, head_dim=512)
        self.refused(t.LlamaForCausalLM(large), "self_attn: heads of 512:512: expected sizes within one")
        with torch.device("meta"):
            self.refused(t.LlamaForCausalLM(t.LlamaConfig(**models.COMMON)), "on meta: only models in host memory")
        self.refused(models.make(t.LlamaConfig(**models.COMMON), SEED).double(), "model.dtype = torch.float64")
        self.refused(t.BertLMHeadModel(t.BertConfig(
            vocab_size=211, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)), "mask")
        training = models.make(t.LlamaConfig(**models.COMMON), SEED).train()
        with self.assertRaisesRegex(ValueError, "model.training"):
            Generator(training)
        generator = Generator(training.eval())
        training.train()
        with self.assertRaisesRegex(RuntimeError, "model.training"):
            generator.generate([[1, 2]], max_new_tokens=2)
        self.assertFalse(generator.has_work)

    def test_padded_heads_are_dense(self):
        """As attention functions of transformers return them: some models take a view of them."""
        from chunkattn.transformers.memory import Run

        results, attend = [], Run.attend
        model = models.make(transformers.LlamaConfig(**models.COMMON, head_dim=32), SEED)
        with unittest.mock.patch.object(Run, "attend", lambda *args: results.append(attend(*args)) or results[-1]):
            Generator(model)
        self.assertTrue(results and all(result.is_contiguous() for result in results))

    def test_masks(self):
        from chunkattn.transformers.layers import window_of
        from transformers import masking_utils as masks

        self.assertIsNone(window_of(masks.causal_mask_function))
        for size in (1, 7, 4096):
            self.assertEqual(window_of(masks.sliding_window_causal_mask_function(size)), size)
        self.assertIs(window_of(masks.bidirectional_mask_function), False)
        self.assertIs(window_of(masks.chunked_causal_mask_function(64, torch.zeros(1, dtype=int))), False)
        hidden = masks.and_masks(masks.causal_mask_function, lambda b, h, q, kv: kv != 5)
        self.assertIs(window_of(hidden), False)


if __name__ == "__main__":
    unittest.main()
