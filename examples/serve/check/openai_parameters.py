#!/usr/bin/env python3
"""Each parameter that a stock `openai` client can send, to a server of random weights.

usage: openai_parameters.py SERVE [--seed S]      needs the package openai

Of chats and completions, whole and streamed: supported parameters do what OpenAI says they do, all others are
refused by a BadRequestError that names them, and the client has no parameter that is not tried here."""
import argparse
import inspect
import math
import os
import random
import signal
import sys
import tempfile

from own_python import need

need("openai", "./dev test full", "openai")
import openai

from gguf_files import write_tiny_chat_model
from soak import Failure, Server, check

TOKENS = 24
SUPPORTED = {"messages", "prompt", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "n",
             "stop", "stream", "stream_options", "logprobs", "top_logprobs", "frequency_penalty", "presence_penalty",
             "logit_bias", "echo"}
TAKEN = {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "me", "prompt_cache_key": "k",
         "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}, "parallel_tool_calls": True,
         "store": False, "service_tier": "auto", "response_format": {"type": "text"}, "modalities": ["text"],
         "tool_choice": "none", "tools": [], "functions": [], "function_call": "none", "echo": False, "best_of": 1,
         "suffix": "", "verbosity": "medium", "reasoning_effort": "none"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
REFUSED = {"tools": [TOOL], "tool_choice": "required", "functions": [{"name": "f"}], "function_call": {"name": "f"},
           "response_format": {"type": "json_object"}, "modalities": ["audio"], "store": True, "service_tier": "flex",
           "audio": {"voice": "alloy", "format": "wav"}, "prediction": {"type": "content", "content": "a"},
           "moderation": {"model": "m"}, "reasoning_effort": "high", "verbosity": "low", "web_search_options": {},
           "best_of": 3, "suffix": "behind", "extra_body": {"repeat_penalty": 1.5}}


class Endpoint:
    """Chats or completions, whole or streamed: calls, and what comes back in one form."""

    def __init__(self, client, chat, stream):
        self.chat, self.stream = chat, stream
        self.api = client.chat.completions if chat else client.completions
        self.fixed = {"model": client.models.list().data[0].id}
        if chat:
            self.fixed["messages"] = [{"role": "user", "content": "What is there to say?"}]
        else:
            self.fixed["prompt"] = "There is this to say:"
        self.name = f"{'chat' if chat else 'text'} {'streamed' if stream else 'whole'}"

    def knows(self, name):
        return name == "extra_body" or name in inspect.signature(self.api.create).parameters

    def raw(self, **parameters):
        return self.api.create(**self.fixed, **{"max_tokens": TOKENS, "temperature": 0, **parameters})

    def scored(self, **parameters):
        return self(**({"logprobs": True, "top_logprobs": 20} if self.chat else {"logprobs": 20}), **parameters)

    def __call__(self, **parameters):
        """Choices: (text, logprobs of tokens, finish_reason); logprobs as (own, sorted most likely ones)."""
        if not self.stream:
            return [(choice.message.content if self.chat else choice.text, self.logprobs_of(choice.logprobs),
                     choice.finish_reason) for choice in self.raw(**parameters).choices]
        choices = [["", [], None] for _ in range(parameters.get("n", 1))]
        for chunk in self.raw(**parameters, stream=True):
            for choice in chunk.choices:
                mine = choices[choice.index]
                mine[0] += (choice.delta.content if self.chat else choice.text) or ""
                mine[1] += self.logprobs_of(choice.logprobs)
                mine[2] = choice.finish_reason or mine[2]
        return [tuple(choice) for choice in choices]

    def logprobs_of(self, logprobs):
        if logprobs is None:
            return []
        if self.chat:
            return [((one.token, one.logprob), [(top.token, top.logprob) for top in one.top_logprobs])
                    for one in logprobs.content]
        return [(own, sorted((top or {}).items(), key=lambda item: -item[1]))
                for own, top in zip(zip(logprobs.tokens, logprobs.token_logprobs), logprobs.top_logprobs)]


def try_logprobs(ask):
    (text, scored, _), = ask.scored()
    check(len(scored) == TOKENS, f"{len(scored)} log-probabilities of {TOKENS} tokens")
    for own, top in scored:
        check(own[1] == top[0][1], "greedy, and not the most likely token")
        check(len(top) >= 10 and all(a[1] >= b[1] for a, b in zip(top, top[1:])), "not in order")
        check(0.1 < sum(math.exp(logprob) for _, logprob in top) <= 1.0001, "probabilities of more than 1")
    check(ask()[0][:2] == (text, []), "log-probabilities that were not asked for")
    if ask.chat:
        reply = ask.raw(logprobs=True, top_logprobs=2)
        said = bytes(byte for one in reply.choices[0].logprobs.content for byte in one.bytes)
        check(said.decode(errors="replace") == reply.choices[0].message.content, "bytes that are not the text")
        check(all(len(one.top_logprobs) == 2 for one in reply.choices[0].logprobs.content), "not two")
        check(not any(o.top_logprobs for o in ask.raw(logprobs=True).choices[0].logprobs.content), "top without asking")
    elif not ask.stream:
        found = ask.raw(logprobs=0).choices[0].logprobs
        check(found.text_offset[0] == 0 and sorted(found.text_offset) == found.text_offset, "offsets")


def expected_greedy(scored, frequency, presence):
    """What penalties make of the log-probabilities of the reply; None where that does not say."""
    counts, said = {}, []
    for own, top in scored:
        value = {name: logprob - frequency * counts.get(name, 0) - presence * (name in counts) for name, logprob in top}
        best = max(value, key=value.get)
        unique = [name for name in value if value[name] > value[best] - 1e-3] == [best]
        said.append(best if unique and value[best] > top[-1][1] else None)
        counts[own[0]] = counts.get(own[0], 0) + 1
    return said


def try_echo(ask):
    if ask.chat:
        return
    prompt, prompts = ask.fixed["prompt"], [ask.fixed["prompt"], "Another prompt."]
    (text, plain, _), (echoed, scored, _) = ask.scored()[0], ask.scored(echo=True)[0]
    check(echoed == prompt + text, f"echo: {echoed!r}")
    check(scored[-TOKENS:] == plain and scored[0][0][1] is None, "echo: other log-probabilities")
    check(all(own[1] <= 0 for own, _ in scored[1:]), "echo: no log-probabilities of the prompt")
    if not ask.stream:
        alone = ask.api.create(model=ask.fixed["model"], prompt=prompts, echo=True, max_tokens=0, logprobs=1)
        check([choice.text for choice in alone.choices] == prompts, "echo alone")
        check(alone.choices[0].logprobs.token_logprobs == [own[1] for own, _ in scored[:-TOKENS]], "echo alone")


def try_penalties(ask):
    for frequency, presence in ((1.5, 0), (0, 2), (0.7, 0.6)):
        (_, scored, _), = ask.scored(frequency_penalty=frequency, presence_penalty=presence)
        # Tokens that are half a character have one name in chats: those say nothing of counts.
        if any("\ufffd" in name for own, top in scored for name in [own[0], *(n for n, _ in top)]):
            scored = []
        expected = expected_greedy(scored, frequency, presence)
        known = [(e, own[0]) for e, (own, _) in zip(expected, scored) if e is not None]
        check(all(e == own for e, own in known), f"penalties {frequency}, {presence}: {known}")
        check(ask.chat or len(known) > TOKENS // 2, "penalties were not compared")
    plain = ask()[0][0]
    check(ask(frequency_penalty=2, presence_penalty=2)[0][0] != plain, "penalties that change nothing")


def try_logit_bias(ask):
    (text, scored, _), = ask.scored()
    a = 3 + ord("a")
    # The names of bytes follow three special tokens.
    (forced, biased, _), = ask.scored(logit_bias={str(a): 100})
    check(forced == "a" * TOKENS, f"a bias of 100: {forced!r}")
    # Where "a" is not among the most likely ones, a completion adds it to them.
    check(biased[0][1][:len(scored[0][1])] == scored[0][1], "a bias that changes log-probabilities")
    # Read by tokens: a completion may say "<|im_start|>", which has the letter.
    (_, banned, _), = ask.scored(logit_bias={str(a): 100, a: -100})
    check(all(own[0] != "a" for own, _ in banned), "a bias of -100")
    both = ask(logit_bias={str(a): 100, str(a + 1): 100}, frequency_penalty=2)[0][0]
    check(set(both) == {"a", "b"} and abs(both.count("a") - TOKENS / 2) <= 4, f"bias and penalty: {both}")
    check(text != forced, "nothing to see")


def try_narrowing(ask):
    greedy = ask()[0][0]
    for narrow in ({"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1}}, {"top_p": 1e-6}):
        check(ask(temperature=2, **narrow)[0][0] == greedy, f"{narrow}: not the most likely")
    (_, scored, _), = ask.scored(temperature=2, seed=1, extra_body={"top_k": 2})
    check(all(own[1] >= top[1][1] for own, top in scored), "top_k = 2: a third one")
    check(any(own[1] < top[0][1] for own, top in scored), "top_k = 2: only the first")
    (_, scored, _), = ask.scored(temperature=2, seed=1, extra_body={"min_p": 0.5})
    check(all(own[1] >= top[0][1] - 2 * math.log(2) - 1e-4 for own, top in scored), "min_p = 0.5: less")
    (_, scored, _), = ask.scored(temperature=2, seed=1)
    check(any(own[1] < top[0][1] - 2 * math.log(2) for own, top in scored), "without min_p: nothing less")


def try_seeds(ask):
    one, two = (ask(temperature=1.5, seed=seed, n=3) for seed in (1, 2))
    check(ask(temperature=1.5, seed=1, n=3) == one, "the same seed, another text")
    check(one != two and len({text for text, _, _ in one}) == 3, "texts that should differ")
    check(ask(temperature=1.5, seed=1)[0] == one[0], "the first of three is not the only one of one")
    check(ask(temperature=1.5)[0] != ask(temperature=1.5)[0], "without a seed the same text")


def try_ends(ask):
    warm = {"temperature": 1.5, "seed": 3}  # greedily all may be one letter
    text = ask(**warm)[0][0]
    stop = next(c for c in text[3:] if c not in text[:3] and c != "\ufffd")
    for given in (stop, [stop, "never said"]):
        got, _, why = ask(stop=given, **warm)[0]
        check((got, why) == (text[:text.index(stop)], "stop"), f"stop = {given!r}: {got!r}, {why}")
    check(ask(max_tokens=5)[0][2] == "length", "max_tokens")
    if ask.chat:
        check(len(ask.scored(max_completion_tokens=5)[0][1]) == 5, "max_completion_tokens")


def try_usage(ask):
    if not ask.stream:
        usage = ask.raw().usage
        check(usage.completion_tokens == TOKENS, "usage")
        return
    chunks = list(ask.raw(stream=True, stream_options={"include_usage": True}))
    check(not chunks[-1].choices and chunks[-1].usage.completion_tokens == TOKENS, "the last chunk has no usage")
    check(all(chunk.usage is None for chunk in chunks[:-1]), "usage before the last chunk")
    check(all(chunk.usage is None for chunk in ask.raw(stream=True)), "usage that was not asked for")


def refusal(call):
    try:
        call()
    except openai.APIStatusError as error:
        return error
    raise Failure("taken: it should be refused")


def try_others(ask):
    text = ask()[0][0]
    for name, value in TAKEN.items():
        if ask.knows(name):
            check(ask(**{name: value})[0][0] == text, f"{name} = {value}: another text")
    for name, value in REFUSED.items():
        if not ask.knows(name):
            continue
        error = refusal(lambda name=name, value=value: ask(**{name: value}))
        named = next(iter(value)) if name == "extra_body" else name
        check(isinstance(error, openai.BadRequestError) and error.param == named, f"{name}: {error}")
        check(error.body["message"].startswith(named + " = "), error.body["message"])
    for name in ("no_such_field", "include_stop_str_in_output"):
        check(refusal(lambda name=name: ask(extra_body={name: True})).param == name, name)
    for name, value in (("frequency_penalty", 2.1), ("presence_penalty", -2.1), ("logit_bias", {"nonsense": 1}),
                        ("top_p", 2), ("temperature", 3), ("n", 0), ("seed", 1.5), ("logprobs", 21)):
        check(refusal(lambda name=name, value=value: ask(**{name: value})).param == name, name)
    for name in inspect.signature(ask.api.create).parameters:
        known = name in SUPPORTED or name in TAKEN or name in REFUSED
        check(known or name in ("self", "timeout") or name.startswith("extra_"), f"{name} was not tried")


def try_all(client):
    for chat in (True, False):
        pair = [Endpoint(client, chat, stream) for stream in (False, True)]
        for parameters in ({}, {"temperature": 1.2, "seed": 7, "n": 2, "presence_penalty": 1}):
            whole, streamed = (ask.scored(**parameters) for ask in pair)
            check(whole == streamed, f"{pair[0].name}: streamed it is another\n{whole}\n{streamed}")
        for ask in pair:
            for part in (try_logprobs, try_echo, try_penalties, try_logit_bias, try_narrowing, try_seeds, try_ends, try_usage,
                         try_others):
                if part is try_logprobs and ask.chat and ask.stream:
                    continue  # its raw replies are whole ones
                try:
                    part(ask)
                except Exception as error:
                    raise Failure(f"{ask.name}, {part.__name__}: {error}") from error
            print(f"{ask.name}: as OpenAI says", flush=True)
    for missing in (lambda: client.embeddings.create(model="m", input="a"),
                    lambda: client.responses.create(model="m", input="a")):
        error = refusal(missing)
        check(isinstance(error, openai.NotFoundError) and "not supported" in str(error), error)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    print(f"openai {openai.__version__}, --seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tiny.gguf")
        write_tiny_chat_model(path, arguments.seed)
        server = Server([arguments.serve, "run", "--model", path, "--weights", "fp32", "--mode", "batch_invariant"])
        try:
            try_all(openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0))
        except Failure as failure:
            print(f"FAILED: {failure}")
            return 1
        finally:
            server.end(signal.SIGTERM)
    print("all parameters were tried")
    return 0


if __name__ == "__main__":
    sys.exit(main())
