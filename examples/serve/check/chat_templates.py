#!/usr/bin/env python3
"""Chats as `serve run` writes them, beside `apply_chat_template` of transformers.

usage: chat_templates.py SERVE [--histories N] [--seed S] [--template NAME=FILE]...
       chat_templates.py --record FILE

For each family of models a server with random weights gets a template of chat_templates/ (written for this check: the
documented formats, and the marks by which serve knows the families), and random histories: right ones, wrong ones, with
white space, special tokens and tools in what is said. POST /tokenize must give the very text, or refuse what the
template refuses. --template takes a real model's own template in place of one of these. --record writes some histories
with their prompts, for serve_chat_test. Needs transformers and jinja2, and no torch: ./dev chat_templates."""
import argparse
import http.client
import json
import os
import random
import signal
import sys
import tempfile

from own_python import need

need("chat", "./dev chat_templates", "transformers", "jinja2")
import transformers
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gguf_files import byte_names, write_tiny_chat_model
from soak import Server

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "chat_templates")
GEMMA = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]"]
PHI3 = ["<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
LLAMA3 = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
# The special tokens: the first begins a text, the second ends one.
NAMES = {"gemma2": GEMMA, "gemma3": GEMMA, "mistral_0_1": MISTRAL, "mistral_0_2": MISTRAL, "mistral_0_3": MISTRAL,
         "mistral_0_3_last_user": MISTRAL, "mistral_nemo": MISTRAL, "phi3": PHI3, "phi3_5": PHI3, "phi3_medium": PHI3, "llama3_1": LLAMA3,
         "llama3_2": LLAMA3}
SAID = ["Hello", "ab", "\n", " ", "  ", "\t", "é", "日本", "🙂", "\u00a0", "\u3000", "\u2028", "\x1d", "\x85", "{{ x }}",
        "{% raw %}", "\\n", "\"", "'", "[INST]", "<start_of_turn>", "<|end|>", "<|eot_id|>", "</s>", "<<SYS>>", "word"]


def text(rng):
    return "".join(rng.choice(SAID) for _ in range(rng.randint(0, 6)))


def history(rng, name):
    """Mostly by turns, after a system message or none."""
    roles = ["system"] if rng.random() < 0.4 else []
    roles += ["user" if i % 2 == 0 else "assistant" for i in range(rng.randint(1, 6))]
    if rng.random() < 0.3:
        roles[rng.randrange(len(roles))] = rng.choice(["user", "assistant", "system"])
    if not name.startswith("phi3") and rng.random() < 0.15:  # Phi-3's templates say nothing of tools: serve refuses them
        roles[rng.randrange(len(roles))] = "tool"
    messages = [{"role": role, "content": text(rng)} for role in roles]
    for message in messages:
        if name.startswith("llama3") and message["role"] == "assistant" and rng.random() < 0.3:
            calls = range(2 if rng.random() < 0.2 else 1)
            message["tool_calls"] = [{"type": "function", "function": {"name": f"f{i}", "arguments": {"x": text(rng)}}}
                                     for i in calls]
    if rng.random() < 0.2 and len(messages) > 2:
        messages[-1]["content"] = messages[-3]["content"]
    return messages


def expected(tokenizer, messages):
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, IndexError):  # refused; or a system message alone, behind which a template expects another
        return None


def as_sent(messages):
    """As clients of OpenAI's have it: what a tool is given is a text."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return messages


class Site:
    def __init__(self, serve, folder, special, template):
        path = os.path.join(folder, "tiny.gguf")
        write_tiny_chat_model(path, 1, special, template)
        self.bytes_of = {name: bytes([byte]) for byte, name in enumerate(byte_names())}
        self.tokens = special + byte_names() + ["ab"]
        self.special = special
        self.server = Server([serve, "run", "--model", path, "--threads", "1"])

    def prompt(self, messages):
        """The text of a chat's tokens; None where it is refused."""
        connection = self.server.connect()
        connection.request("POST", "/tokenize", json.dumps({"messages": messages}), {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = json.loads(response.read())
        connection.close()
        if response.status == 400 and "messages" in body["error"]["message"]:
            return None
        assert response.status == 200, body
        return b"".join(name.encode() if name in self.special else b"".join(self.bytes_of[c] for c in name)
                        for name in (self.tokens[token] for token in body["tokens"])).decode()


def cases(name, template, count, seed):
    """Histories, and what transformers makes of them."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token=NAMES[name][0],
                                        eos_token=NAMES[name][1], chat_template=template)
    rng = random.Random(f"{seed} {name}")
    histories = [history(rng, name) for _ in range(count)]
    return [{"messages": as_sent(messages), "prompt": expected(tokenizer, messages)} for messages in histories]


def compare(serve, name, template, all_cases):
    """Returns how many differ."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        site = Site(serve, folder, NAMES[name], template)
        try:
            for case in all_cases:
                ours = site.prompt(case["messages"])
                wrong += ours != case["prompt"]
                if ours != case["prompt"] and wrong <= 3:
                    print(f"  {case['messages']}\n    serve        {ours!r}\n    transformers {case['prompt']!r}")
        finally:
            site.server.end(signal.SIGTERM)
    refused = sum(case["prompt"] is None for case in all_cases)
    print(f"{name}: {len(all_cases) - wrong} of {len(all_cases)} histories have the same prompt; "
          f"{refused} are refused", flush=True)
    return wrong


def record(path, by_name):
    """Six prompts and three refusals of each template, a line each."""
    lines = []
    for name, all_cases in by_name.items():
        good = [case for case in all_cases if case["prompt"] is not None][:6]
        refused = [case for case in all_cases if case["prompt"] is None][:3]
        rows = ",\n".join(json.dumps(case) for case in good + refused)
        lines.append(f"{json.dumps(name)}: [\n{rows}]")
    with open(path, "w", encoding="ascii") as file:
        file.write("{" + ",\n".join(lines) + "}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("serve", nargs="?")
    parser.add_argument("--histories", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--template", action="append", default=[])
    parser.add_argument("--record", default="")
    arguments = parser.parse_args()
    if bool(arguments.serve) == bool(arguments.record):
        parser.error("expected SERVE, or --record FILE")
    print(f"transformers {transformers.__version__}, --seed {arguments.seed}", flush=True)
    files = {name: os.path.join(HERE, name + ".jinja") for name in NAMES}
    given = dict(one.split("=", 1) for one in arguments.template)
    wrong, by_name = 0, {}
    for name in given or NAMES:
        with open(given.get(name, files[name]), encoding="utf-8") as file:
            template = file.read()
        by_name[name] = cases(name, template, arguments.histories, arguments.seed)
        if arguments.serve:
            wrong += compare(arguments.serve, name, template, by_name[name])
    if arguments.record:
        del by_name["llama3_2"]  # whose prompts are another day's
        record(arguments.record, by_name)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
