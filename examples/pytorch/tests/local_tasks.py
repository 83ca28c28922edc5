"""Tasks of lm-evaluation-harness in files of this machine: a YAML file and its questions for each."""

import json
import pathlib
import random

LETTERS = "ABCD"
QUESTION = "Read: {{passage}}\nQuestion: what comes next?\nAnswer:"
LETTERED = ("Read: {{passage}}\nQuestion: what comes next?\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\n"
            "D. {{choices[3]}}\nAnswer:")  # fmt: skip
CHOICE = {"output_type": "multiple_choice", "doc_to_target": "{{answer}}",
          "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}  # fmt: skip
FIRST = {"fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}, "num_fewshot": 5}
ANEW = {"fewshot_split": "train", "num_fewshot": 5}  # lm-eval's default: drawn for each question
TASKS = {
    # The same five examples before each question; four choices of several tokens.
    "choices_same": CHOICE | FIRST | {"doc_to_text": QUESTION, "doc_to_choice": "{{choices}}"},
    "choices_anew": CHOICE | ANEW | {"doc_to_text": QUESTION, "doc_to_choice": "{{choices}}"},
    # Choices of one token, as MMLU's.
    "letters_same": CHOICE | FIRST | {"doc_to_text": LETTERED, "doc_to_choice": list(LETTERS)},
    "letters_anew": CHOICE | ANEW | {"doc_to_text": LETTERED, "doc_to_choice": list(LETTERS)},
    # Endings of a text, no examples, as HellaSwag.
    "endings": CHOICE | {"doc_to_text": "{{passage}}", "doc_to_choice": "{{choices}}"},
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}]},  # fmt: skip
    "generate": FIRST | {"output_type": "generate_until", "doc_to_text": QUESTION, "doc_to_target": "{{choices[0]}}",
                         "generation_kwargs": {"until": ["e"], "max_gen_toks": 9, "do_sample": False},
                         "metric_list": [{"metric": "exact_match"}]},  # fmt: skip
}  # fmt: skip


def write(folder, words, questions, passage_words=60, example_words=None, choice_words=4, text_words=300, seed=1):
    """Writes all tasks. words: that texts are made of, in their order. example_words: passages of the examples."""
    folder, draw = pathlib.Path(folder), random.Random(seed)

    def piece(count):
        begin = draw.randrange(len(words) - count)
        return words[begin : begin + count]

    def document(passage_words):
        """A passage, how it goes on, and three pieces from elsewhere."""
        whole = piece(passage_words + choice_words)
        choices = [" ".join(piece(choice_words)) for _ in range(3)]
        answer = draw.randrange(4)
        choices.insert(answer, " ".join(whole[passage_words:]))
        text = " ".join(piece(draw.randrange(text_words // 2, text_words + 1)))
        return {"passage": " ".join(whole[:passage_words]), "choices": choices, "answer": answer, "text": text}

    files = {}
    for split, count, length in (("train", 40, example_words or passage_words), ("test", questions, passage_words)):
        files[split] = str(folder / f"{split}.jsonl")
        lines = [json.dumps(document(length)) for _ in range(count)]
        pathlib.Path(files[split]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, task in TASKS.items():
        task = task | {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files},
                       "test_split": "test"}  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # which is YAML, too
