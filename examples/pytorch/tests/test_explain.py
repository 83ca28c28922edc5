"""Why prompts are found in the cache, or are not: Request.cache_report of Generator.

    python -m unittest test_explain
"""

import unittest

import models
import transformers

import chunkattn
from chunkattn.transformers import Generator

SEED = 11


def ranges_of(report):
    return [(one["reason"], one["begin"], one["end"]) for one in report["ranges"]]


def run(generator, prompt, **options):
    request, = generator.generate([prompt], max_new_tokens=2, eos_token_id=None, **options)
    return request.cache_report


def llama():
    return models.make(transformers.LlamaConfig(**models.COMMON, head_dim=64), SEED)


class TestExplain(unittest.TestCase):
    def test_a_prompt_is_found_parts_and_is_evicted(self):
        generator = Generator(llama(), max_chunks=8, explain_tokens=1000, check=False)
        prompt = list(range(1, 121))
        self.assertEqual(ranges_of(run(generator, prompt)), [("never_seen", 0, 120)])
        self.assertEqual(ranges_of(run(generator, prompt)), [("found", 0, 119), ("above_max_reuse", 119, 120)])
        other = prompt[:50] + [200] * 20
        report = run(generator, other)
        self.assertEqual(ranges_of(report), [("found", 0, 50), ("never_seen", 50, 70)])
        self.assertEqual((report["parts_at"], report["cached_token"]), (50, prompt[50]))
        self.assertEqual(ranges_of(run(generator, other, tenant=5)), [("never_seen", 0, 70)])
        self.assertEqual(ranges_of(run(generator, other, tenant=5, adapter=1)),
                         [("other_adapter", 0, 70)])  # fmt: skip
        run(generator, [150] * 350)
        last = run(generator, prompt)["ranges"][-1]
        self.assertEqual((last["reason"], last["cause"]), ("evicted", "space"))
        self.assertGreaterEqual(last["tokens_ago"], 0)

    def test_what_is_told_is_what_is_found(self):
        generator = Generator(llama(), max_chunks=6, explain_tokens=1000, check=False)
        for i in range(12):
            prompt = [1 + i % 3] * (30 + 20 * (i % 4)) + list(range(10, 60))
            request, = generator.generate([prompt], max_new_tokens=2, eos_token_id=None)
            told = request.cache_report["ranges"]
            self.assertEqual([one["begin"] for one in told], [0] + [one["end"] for one in told][:-1])
            self.assertEqual(told[-1]["end"], len(prompt))
            found = sum(one["end"] - one["begin"] for one in told if one["reason"] == "found")
            self.assertEqual(found, request.cached_tokens)

    def test_what_has_no_window_or_state_is_not_resumable(self):
        window = transformers.Gemma3TextConfig(**models.COMMON, head_dim=32, layer_types=models.MIXED, sliding_window=11)
        state = transformers.Lfm2Config(**models.COMMON | dict(num_hidden_layers=3),
                                        layer_types=["conv", "full_attention", "conv"])  # fmt: skip
        for config in (window, state):
            generator = Generator(models.make(config, SEED), max_chunks=40, explain_tokens=1000, check=False)
            reports = [run(generator, [7] * 100 + [end] * 40) for end in (1, 2, 3)]
            with self.subTest(type(config).__name__):
                self.assertEqual(ranges_of(reports[0]), [("never_seen", 0, 140)])
                self.assertEqual(ranges_of(reports[1]), [("not_resumable", 0, 100), ("never_seen", 100, 140)])
                self.assertEqual(ranges_of(reports[2]), [("found", 0, 100), ("never_seen", 100, 140)])

    def test_nothing_is_said_unless_it_is_wanted(self):
        generator = Generator(llama(), max_chunks=8, check=False)
        self.assertIsNone(run(generator, [1, 2, 3]))
        for wrong in (-1, 1.5, True):
            with self.assertRaisesRegex((TypeError, ValueError), "explain_tokens"):
                Generator(llama(), max_chunks=8, check=False, explain_tokens=wrong)

    def test_an_explainer_of_ones_own_tree(self):
        tree = chunkattn.Tree(10)
        explainer = chunkattn.CacheExplainer(tree, 100)
        self.assertEqual(explainer.explain([1, 2, 3]), {"ranges": [{"begin": 0, "end": 3, "reason": "never_seen"}]})
        sequence = tree.insert([1, 2, 3])
        self.assertEqual(ranges_of(explainer.explain([1, 2, 3, 4])), [("pending", 0, 3), ("never_seen", 3, 4)])
        del tree, sequence
        self.assertEqual(ranges_of(explainer.explain([1])), [("never_seen", 0, 1)])  # it keeps the tree
        for wrong in ([], "text"):
            with self.assertRaisesRegex(ValueError, "tokens"):
                explainer.explain(wrong)
        with self.assertRaisesRegex(ValueError, "max_tokens = 0"):
            chunkattn.CacheExplainer(chunkattn.Tree(10), 0)


if __name__ == "__main__":
    unittest.main()
