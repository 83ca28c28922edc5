#!/usr/bin/env python3
"""What a long prompt costs the streams beside it: the longest time between two of their tokens, and its own tokens/s.

usage: stall.py SERVE MODEL.gguf [--tokens N] [--streams N] [--rounds N]

Before that, prompts go through all of the K/V memory, whose first use takes time of its own."""
import argparse
import http.client
import json
import random
import subprocess
import threading
import time


def ask(port, **body):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    return reply


def listen(port, number, arrivals):
    try:
        reply = ask(port, prompt=f"{number}: once upon a time", max_tokens=4000, stream=True, seed=number,
                    logit_bias={"0": -100, "2": -100})  # SmolLM2's end tokens
        for line in reply:
            if line.startswith(b"data: {"):
                arrivals.append(time.perf_counter())
    except (OSError, http.client.HTTPException):
        pass  # the server is being terminated


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    server = subprocess.Popen([arguments.serve, "run", "--model", arguments.model, "--port", "0", "--quiet"],
                              stdout=subprocess.PIPE, text=True)
    try:
        port = next(int(line.rsplit(":", 1)[1]) for line in server.stdout if line.startswith("serving"))
        dice = random.Random(1)

        def prompt(tokens):
            start = time.perf_counter()
            ask(port, prompt=[dice.randrange(1000, 40000) for _ in range(tokens)], max_tokens=1).read()
            return start, time.perf_counter()

        def free_chunks():
            tree = http.client.HTTPConnection("127.0.0.1", port)
            tree.request("GET", "/tree")
            return json.load(tree.getresponse())["chunks"]["free"]
        before = None
        while (free := free_chunks()) not in (0, before):
            before = free
            prompt(3000)
        streams = [[] for _ in range(arguments.streams)]
        for number, arrivals in enumerate(streams):
            threading.Thread(target=listen, args=(port, number, arrivals), daemon=True).start()
        time.sleep(2)
        for _ in range(arguments.rounds):
            start, end = prompt(arguments.tokens)
            time.sleep(0.5)
            # Of each stream; the least of them, as a token that ends within a character is not sent.
            gaps = [max((b - a for a, b in zip(times, times[1:]) if b > start and a < end), default=0)
                    for times in streams]
            print(f"{arguments.tokens} tokens in {end - start:.2f} s, {arguments.tokens / (end - start):.0f} tokens/s" +
                  (f"; longest time between two tokens of a stream {min(gaps):.3f} s" if gaps else ""), flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
