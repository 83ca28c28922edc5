"""Models with recurrent layers beside attention, whose states are kept where texts part, in Generator.

    python -m unittest test_hybrids
"""

import contextlib
import gc
import inspect
import io
import pathlib
import random
import threading
import unittest
import unittest.mock
import weakref

import models
import torch
import transformers
from test_transformers import SEED, Recorder, alone, check_logits, run_all

import chunkattn
from chunkattn.transformers import Generator, Unsupported, states

TOLERANCE = 1e-4
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
KINDS = ["linear_attention", "full_attention", "linear_attention"]
MAMBA = dict(mamba_n_heads=8, mamba_d_state=8, mamba_chunk_size=32)


def configurations():
    """Gated DeltaNet, short convolution, Mamba 2 (with attention in the same layer, too), Mamba 1."""
    t, common = transformers, models.COMMON | dict(num_hidden_layers=3)
    yield "qwen3_next", t.Qwen3NextConfig(**common, **DELTA, **EXPERTS, head_dim=32, layer_types=KINDS)
    yield "lfm2", t.Lfm2Config(**common, **SPECIAL, conv_L_cache=4,
                               layer_types=["conv", "full_attention", "conv"])  # fmt: skip
    yield "granite_4", t.GraniteMoeHybridConfig(
        **common, **MAMBA, layer_types=KINDS, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=96,
        position_embedding_type="rope", attention_multiplier=0.3, logits_scaling=2.0)  # fmt: skip
    yield "falcon_h1", t.FalconH1Config(**common, **MAMBA, head_dim=16, mamba_d_head=16, mamba_d_ssm=128)
    yield "jamba", t.JambaConfig(**common, attn_layer_period=2, attn_layer_offset=1, num_experts=1,
                                 num_experts_per_tok=1, use_mamba_kernels=False, mamba_d_state=8)  # fmt: skip


CONFIGURATIONS = dict(configurations())
FAMILIES = ("qwen3_next", "lfm2", "granite_4")  # one of each kind


def make(family):
    return models.make(CONFIGURATIONS[family], SEED)


class HybridsTest(unittest.TestCase):
    def draw(self, *more):
        return random.Random(f"{SEED} {self.id()} {more}")

    def texts(self, draw, count, length):
        """Prompts that part from earlier ones in random places."""
        texts = [[draw.randrange(211) for _ in range(length)]]
        while len(texts) < count:
            known = draw.choice(texts)
            texts.append(known[: draw.randrange(len(known))] + [draw.randrange(211) for _ in range(draw.randrange(1, 50))])
        return texts

    def check_idle(self, generator):
        """Nothing is held any more, but for states that are kept, as many as there may be."""
        self.assertEqual(generator.tree.stats()["live_sequences"], 0)
        pool = generator._memory.states
        stats = pool.checkpoints.stats()
        self.assertLessEqual(stats["count"], pool.num_kept)
        self.assertEqual(pool.count - len(pool.free), stats["count"])
        self.assertEqual(len(set(pool.free)), len(pool.free))
        for layer in pool.layers:
            self.assertEqual([tensors[key] for tensors, key in layer.keys], [None] * len(layer.keys))

    def test_texts_of_each_family(self):
        """16 texts that part anywhere, some at once, others after those before: as by transformers' generate()."""
        for family in CONFIGURATIONS:
            with self.subTest(family):
                draw, model = self.draw(family), make(family)
                ours = Generator(model, step_tokens=draw.randrange(30, 200), max_chunks=100)
                self.assertEqual([layer.by_token for layer in ours._memory.states.layers],
                                 [family == "jamba"] * len(ours._memory.states.layers))  # fmt: skip
                requests, worst = [], 0.0
                for prompt in self.texts(draw, 16, 200):
                    recorder = Recorder()
                    requests.append((ours.submit(prompt, max_new_tokens=6, eos_token_id=None,
                                                 logits_processor=[recorder]), recorder))  # fmt: skip
                    while draw.randrange(2) and ours.has_work:
                        ours.step()
                run_all(ours)
                for request, recorder in requests:
                    ids = torch.tensor([request.prompt])
                    theirs = model.generate(
                        ids, attention_mask=torch.ones_like(ids), pad_token_id=0, max_new_tokens=6, eos_token_id=None,
                        do_sample=False, output_logits=True, return_dict_in_generate=True)  # fmt: skip
                    expected = torch.cat(theirs.logits)
                    for (_, logits), row in zip(recorder.seen, expected):
                        worst = max(worst, float((logits - row).abs().max() / row.abs().max()))
                        first, second = row.topk(2).values.tolist()
                        if first - second <= 2 * TOLERANCE * float(row.abs().max()):
                            break  # two tokens are as likely: texts may part here
                    else:
                        self.assertEqual(request.tokens, theirs.sequences[0, len(request.prompt) :].tolist())
                print(f"{family}: logits differ by at most {worst:.1e} of the largest", flush=True)
                self.assertLess(worst, TOLERANCE)
                stats = ours.stats
                self.assertEqual(stats["preemptions"], 0)
                self.assertGreater(stats["cached_tokens"], 0)
                self.assertEqual(stats["rows"], stats["prompt_tokens"] - stats["cached_tokens"]
                                 + stats["new_tokens"] - len(requests))  # fmt: skip
                self.assertEqual(stats["cached_tokens"], sum(request.cached_tokens for request, _ in requests))
                self.check_idle(ours)

    def test_every_position(self):
        """Two texts that part from a third one at each of its positions: the second of them computes from there on."""
        draw = self.draw()
        model = make(draw.choice(FAMILIES))
        base = [draw.randrange(200) for _ in range(200)]
        ours = Generator(model, max_chunks=400, check=False)
        ours.generate([base], max_new_tokens=1, eos_token_id=None)
        positions = list(range(1, 200))
        draw.shuffle(positions)
        for at in positions:
            for end in (200, 201):
                rows, recorder = ours.stats["rows"], Recorder()
                request, = ours.generate([base[:at] + [end, 202]], max_new_tokens=1, eos_token_id=None,
                                         logits_processor=[recorder])  # fmt: skip
                if end == 201:
                    self.assertEqual((request.cached_tokens, ours.stats["rows"] - rows), (at, 2))
                    self.assertLess(check_logits(self, model, request, recorder, TOLERANCE), TOLERANCE)
        self.check_idle(ours)

    def test_steps(self):
        """A state is wanted before a prompt's last token: no step more for that. Where texts part, one ends there."""
        ours = Generator(make("lfm2"), check=False)
        for prompt, steps in (([5] * 100, 1), ([5] * 100, 1), ([5] * 60 + [7] * 50, 2), ([5] * 60 + [8] * 50, 1)):
            before = ours.stats["steps"]
            ours.generate([prompt], max_new_tokens=1, eos_token_id=None)
            self.assertEqual(ours.stats["steps"] - before, steps)
        short = Generator(ours.model, max_states=8, check=False)
        for token in range(12):  # as well when all states are kept that may be
            short.generate([[token] * 20], max_new_tokens=1, eos_token_id=None)
        self.assertEqual(short.stats["steps"], 12)
        # A chat goes on from its end.
        request, = ours.generate([[9] * 30], max_new_tokens=20, eos_token_id=None)
        again, = ours.generate([[9] * 30 + request.tokens + [3]], max_new_tokens=1, eos_token_id=None)
        self.assertEqual(again.cached_tokens, 49)

    def test_random_requests(self):
        """Forks, cancelled requests, steps that fail, too little memory for K/V or states, scores."""
        for trial in range(4):
            draw = self.draw(trial)
            family = draw.choice(sorted(CONFIGURATIONS))
            options = dict(max_chunks=draw.randrange(8, 30), step_tokens=draw.randrange(10, 150),
                           max_states=draw.randrange(1, 20), max_sequences=draw.randrange(2, 9))  # fmt: skip
            with self.subTest(family, trial=trial, **options):
                model = make(family)
                ours, fails = Generator(model, **options), []

                def fail(*_):
                    if fails and draw.randrange(3) == 0:
                        fails.clear()
                        raise RuntimeError("planned")

                for module in model.modules():
                    if not list(module.children()):
                        module.register_forward_hook(fail)
                requests = []
                for prompt in self.texts(draw, 12, 250):
                    recorder = Recorder()
                    sampled = dict(n=draw.randrange(2, 5), do_sample=True, seed=1) if draw.randrange(3) == 0 else {}
                    requests.append((ours.submit(prompt, max_new_tokens=draw.randrange(1, 30), eos_token_id=None,
                                                 logits_processor=[recorder], **sampled), recorder))  # fmt: skip
                    for _ in range(draw.randrange(6)):
                        if draw.randrange(4) == 0:
                            fails.append(1)
                        with contextlib.suppress(RuntimeError):
                            ours.step()
                        fails.clear()
                        ours.tree.check_invariants()
                    if draw.randrange(4) == 0:
                        draw.choice(requests)[0].cancel()
                    if draw.randrange(8) == 0:
                        ours.tree.clear()
                    if draw.randrange(4) == 0:
                        tail = [draw.randrange(211) for _ in range(draw.randrange(1, 5))]
                        score, = ours.score(prompt, [tail])
                        rows = alone(model, prompt + tail)[len(prompt) - 1 : -1].log_softmax(-1)
                        expected = rows.gather(1, torch.tensor(tail)[:, None])[:, 0]
                        self.assertLess(float((torch.tensor(score.logprobs) - expected).abs().max()),
                                        TOLERANCE * float(expected.abs().max()))  # fmt: skip
                run_all(ours)
                for request, recorder in requests:
                    if request.finish_reason != "cancelled":
                        self.assertLess(check_logits(self, model, request, recorder, TOLERANCE), TOLERANCE)
                self.check_idle(ours)

    def test_preemption(self):
        """More texts than K/V has room for. One that comes again goes on where it was."""
        draw, model = self.draw(), make("lfm2")
        ours = Generator(model, max_chunks=9, step_tokens=64)
        requests = ours.generate([[draw.randrange(200) for _ in range(60)] for _ in range(6)], max_new_tokens=80,
                                 eos_token_id=None)  # fmt: skip
        self.assertGreater(ours.stats["preemptions"], 0)
        for request in requests:
            logits = alone(model, request.prompt + request.tokens[:-1])[59:]
            top = logits.topk(2).values
            sure = (top[:, 0] - top[:, 1]) > 2e-4 * logits.abs().max()
            self.assertTrue((logits.argmax(-1)[sure] == torch.tensor(request.tokens)[sure]).all())
        self.check_idle(ours)

    def test_cancelled_while_it_is_computed_again(self):
        """Its state is that after its own rows, though K/V of more tokens is there."""
        draw, model = self.draw(), make("lfm2")
        ours, recorder = Generator(model, step_tokens=20, check=False), Recorder()
        base = [draw.randrange(200) for _ in range(100)]
        ours.generate([base], max_new_tokens=1, eos_token_id=None)
        request = ours.submit(base[:80] + [201] * 5, max_new_tokens=1, eos_token_id=None)
        ours.step()
        request.cancel()
        again, = ours.generate([request.prompt], max_new_tokens=1, eos_token_id=None, logits_processor=[recorder])
        self.assertEqual(again.cached_tokens, 20)
        self.assertLess(check_logits(self, model, again, recorder, TOLERANCE), TOLERANCE)

    def test_memory(self):
        """kv_bytes counts states, too, and all that fits is used."""
        for family in FAMILIES:
            model = make(family)
            size = sum(tensor.numel() * tensor.element_size()
                       for state in self.cache_of(model) for tensor in state)  # fmt: skip
            draw = self.draw(family)
            for _ in range(4):
                kv_bytes, most = draw.randrange(3 << 20, 64 << 20), draw.choice([None, draw.randrange(1, 40)])
                options = dict(typical_length=draw.randrange(100, 9000), max_sequences=draw.randrange(1, 50))
                ours = Generator(model, kv_bytes=kv_bytes, check=False, max_states=most, **options)
                pool, memory = ours._memory.states, ours._memory
                self.assertEqual(states.bytes_of(pool.layers), size)
                used = ours.max_chunks * memory.bytes_per_chunk[None] + pool.count * size
                self.assertTrue(kv_bytes - 3 * size - memory.bytes_per_chunk[None] < used <= kv_bytes)
                self.assertLessEqual(ours.max_sequences, options["max_sequences"])
                self.assertEqual(pool.num_live, ours.max_sequences)
                if most:
                    self.assertEqual(pool.num_kept, most)
            with self.assertRaisesRegex(ValueError, r"kv_bytes = 9: expected room for two chunks at least, (\d+) bytes"):
                Generator(model, kv_bytes=9)
        ours = Generator(model, check=False)
        ours.generate([[5] * 100], max_new_tokens=3, eos_token_id=None)
        count = ours._memory.states.checkpoints.stats()["count"]
        self.assertEqual(count, 2)  # before the prompt's last token, and at the end
        self.assertEqual(ours.kv_bytes_used, 2 * ours._memory.bytes_per_chunk[None] + 2 * size)
        said = f"2 of {ours._memory.states.num_kept} states"
        self.assertIn(said, str(ours.tree))
        self.assertIn(said, repr(ours.tree))
        ours.tree.clear()
        ours.generate([[6] * 10], max_new_tokens=1, eos_token_id=None)
        self.assertEqual(ours._memory.states.checkpoints.stats()["count"], 2)
        self.check_idle(ours)
        with self.assertRaisesRegex(ValueError, "max_states = 0: expected at least 1"):
            Generator(model, max_states=0)

    @staticmethod
    def cache_of(model):
        """What transformers' own cache has of each layer with a state, after a prompt."""
        with torch.inference_mode():
            cache = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
        for layer in cache.layers:
            if hasattr(layer, "conv_states"):
                yield [tensor for part in (layer.conv_states, layer.recurrent_states)
                       for tensor in part.values() if tensor is not None]  # fmt: skip

    def test_the_model_is_left_alone(self):
        """After a step, also one that has failed; in one no other thread can call it."""
        model = make("lfm2")
        before = {id(module): dict(module.__dict__) for module in model.modules()}
        ours, said = Generator(model), []

        def other(*_):
            def call():
                try:
                    model.model.layers[0].conv(hidden_states=torch.zeros(1, 2, 64))
                except RuntimeError as error:
                    said.append(str(error))

            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            raise RuntimeError("planned")

        handle = model.lm_head.register_forward_hook(other)
        with self.assertRaisesRegex(RuntimeError, "planned"):
            ours.generate([[1, 2, 3]], max_new_tokens=3, eos_token_id=None)
        handle.remove()
        self.assertIn("cannot be called by another thread", said[0])
        self.check_idle(ours)
        ours.generate([[1, 2, 3]], max_new_tokens=3, eos_token_id=None)
        for module in model.modules():
            self.assertEqual(module.__dict__.keys(), before[id(module)].keys())
        own = weakref.ref(ours)
        del ours
        gc.collect()
        self.assertIsNone(own())

    def test_16_bits(self):
        """As far as rounding allows, which check=True says."""
        for family in FAMILIES:
            Generator(make(family).bfloat16())

    def test_refusals(self):
        """Each by its own reason."""
        t, common = transformers, models.COMMON
        self.refused(t.MiniMaxConfig(**common, layer_types=KINDS[:2]),
                     r"layers.0.self_attn does not run from a state by itself: TypeError: .*position_embeddings")  # fmt: skip
        self.refused(t.RecurrentGemmaConfig(**common, lru_width=64),
                     "recurrent layers whose states .* cache lacks|no layer calls attention by AttentionInterface")  # fmt: skip
        self.refused(t.Mamba2Config(vocab_size=211, hidden_size=64, num_hidden_layers=1, num_heads=8, head_dim=16),
                     "takes no position_ids")  # fmt: skip
        kind = type(make("lfm2").model.layers[0].conv)
        forward = kind.forward

        def forgets(module, hidden_states, **named):
            forward(module, hidden_states, **named)
            return forward(module, hidden_states)

        def keeps_none(module, hidden_states, **named):
            return forward(module, hidden_states)

        def replaces(module, hidden_states, **named):
            """What transformers' layers do not do: the cache has another tensor afterwards."""
            cache = next((given for given in named.values() if hasattr(given, "layers")), None)
            before = cache and cache.layers[module.layer_idx].conv_states[0]
            kept = None if before is None else before.clone()
            out = forward(module, hidden_states, **named)
            if kept is not None:
                cache.layers[module.layer_idx].conv_states[0] = before.clone()
                before.copy_(kept)
            return out

        replaces.__signature__ = inspect.signature(forward)
        with unittest.mock.patch.object(kind, "forward", replaces):
            Generator(make("lfm2"))
        for wrong, reason in ((forgets, r"layers.0.conv: does not go on from a state: tokens after it differ"),
                              (keeps_none, r"layers.0.conv: its state is not in transformers' cache")):  # fmt: skip
            wrong.__signature__ = inspect.signature(forward)
            with unittest.mock.patch.object(kind, "forward", wrong), self.assertRaisesRegex(Unsupported, reason):
                Generator(make("lfm2"))

    def refused(self, config, reason):
        with self.assertRaisesRegex(Unsupported, reason):
            Generator(models.make(config, SEED))

    def test_page(self):
        """The program of docs/pytorch.md prints what stands there."""
        page = pathlib.Path(__file__).resolve().parents[3] / "docs" / "pytorch.md"
        text = page.read_text(encoding="utf-8").split("**Recurrent layers**")[1]
        program, output = (text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "output"))
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(program, str(page), "exec"), {})
        self.assertEqual(said.getvalue(), output)


class CheckpointsTest(unittest.TestCase):
    """Checkpoints by themselves: states are any objects."""

    def compute(self, tree, chat):
        step, plan = tree.begin_step(), chunkattn.Plan()
        step.add(chat)
        plan.build(step)
        finished = step.finished()
        finished.drop()

    def test_states(self):
        class State:
            def __del__(self):  # may call the tree, as what collects garbage may
                gone.append(tree.stats()["live_sequences"])

        gone, tree = [], chunkattn.Tree(4)
        kept = chunkattn.Checkpoints(tree, 2, max_per_path=1)
        self.assertEqual(tree.checkpoints, [kept])
        chat = tree.insert([7] * 100 + [1])
        self.assertEqual((kept.resume(chat), kept.next(chat)), ((0, None), 100))
        self.compute(tree, chat)
        self.assertIsNone(kept.next(chat))
        state = State()
        known = weakref.ref(state)
        self.assertTrue(kept.save(chat, 100, state))
        self.assertFalse(kept.save(chat, 100, "another"))
        del state
        self.assertIsNotNone(known())
        self.assertEqual(kept.find([7] * 101), 100)
        chat = None
        chat = tree.insert([7] * 100 + [2])
        self.assertEqual(kept.resume(chat), (100, known()))
        self.compute(tree, chat)
        self.assertTrue(kept.save(chat, 50, "of one path"))  # which has one alone
        self.assertEqual((known(), gone), (None, [1]))
        self.assertEqual(kept.stats(), {"count": 1, "evicted": 1})
        self.assertTrue(kept.save(chat, 20, State()))
        tree.clear()
        self.assertEqual((kept.stats()["count"], len(gone)), (0, 2))
        another = chunkattn.Tree(4)
        of_another = another.insert([1])
        for make, reason in ((lambda: chunkattn.Checkpoints(tree, 0), "max_count = 0: expected at least 1"),
                             (lambda: chunkattn.Checkpoints(tree, 1, max_per_path=0), "max_per_path = 0"),
                             (lambda: kept.save(chat, 102, 1), "position = 102: expected 1 to num_written"),
                             (lambda: kept.save(chat, 1, None), "state = None: expected what resume"),
                             (lambda: kept.next(of_another), "sequence = of another tree")):  # fmt: skip
            with self.subTest(reason), self.assertRaisesRegex(ValueError, reason):
                make()
        del kept
        self.assertEqual(tree.checkpoints, [])

    def test_states_go_with_their_tokens(self):
        gone, tree = [], chunkattn.Tree(3)
        kept = chunkattn.Checkpoints(tree, 5)

        class State:
            def __del__(self):
                gone.append(self)

        for token in range(6):
            chat = tree.insert([token] * 100)
            self.compute(tree, chat)
            kept.save(chat, 90, State())
            chat = None
        self.assertEqual(len(gone) + kept.stats()["count"], 6)
        self.assertLess(kept.stats()["count"], 3)
        del kept
        self.assertEqual(len(gone), 6)


if __name__ == "__main__":
    unittest.main()
