#!/usr/bin/env python3
"""What sharing saves where many items are scored behind one query: 50 items of 40 tokens behind 2,000, by /v1/score.

usage: score.py SERVE [--model MODEL.gguf] [--items N] [--item-tokens N] [--query-tokens N] [--most RATIO] [--echo]

Once as one request, once with a salt for each item, which shares nothing: the server's processor seconds, the tokens
that it computed, and the largest difference of a probability. --echo: the same prompt twice with its log-probabilities.
Without --model a model of random weights. Exits with 1 if together takes more than RATIO of apart."""
import argparse
import concurrent.futures
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile

SHAPE = {"dim": 256, "hidden_dim": 768, "num_layers": 4, "num_qo_heads": 4, "num_kv_heads": 2, "vocab_size": 8192,
         "max_positions": 4096}


class Server:
    def __init__(self, command):
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = next(int(line.rsplit(":", 1)[1]) for line in self.process.stdout if line.startswith("serving"))

    def ask(self, path, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        answer = json.load(reply)
        assert reply.status == 200, answer
        return answer

    def counts(self):
        """Processor seconds, and tokens that went through the model."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", "/metrics")
        metrics = dict(line.split() for line in connection.getresponse().read().decode().splitlines()
                       if not line.startswith("#"))
        fields = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return seconds, int(metrics["chunkattn_rows_total"])

    def measure(self, name, work):
        before = self.counts()
        result = work()
        seconds, rows = (after - start for after, start in zip(self.counts(), before))
        print(f"{name}: {seconds:.2f} s of processors, {rows} tokens computed", flush=True)
        return result, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("serve")
    parser.add_argument("--model")
    parser.add_argument("--items", type=int, default=50)
    parser.add_argument("--item-tokens", type=int, default=40)
    parser.add_argument("--query-tokens", type=int, default=2000)
    parser.add_argument("--most", type=float, default=1 / 8)
    parser.add_argument("--echo", action="store_true")
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model:
            model, vocabulary = ["--model", arguments.model], 49152
        else:
            shape = os.path.join(folder, "shape.json")
            with open(shape, "w") as file:
                json.dump(SHAPE, file)
            model, vocabulary = ["--random", shape], SHAPE["vocab_size"]
        # One thread, and products whose threads do not spin: what waits is not counted.
        server = Server([arguments.serve, "run", *model, "--port", "0", "--quiet", "--threads", "1", "--timeout",
                         "3600", "--max-wait", "3600", *options])
        try:
            return compare(server, arguments, vocabulary)
        finally:
            server.process.terminate()
            server.process.wait()


def compare(server, arguments, vocabulary):
    dice = random.Random(1)

    def tokens(count):
        return [dice.randrange(100, vocabulary) for _ in range(count)]
    server.ask("/v1/completions", {"prompt": tokens(arguments.query_tokens), "max_tokens": 1})  # first use of memory
    if arguments.echo:
        body = {"prompt": tokens(arguments.query_tokens), "echo": True, "logprobs": 5, "max_tokens": 0}
        first, seconds = server.measure("echo", lambda: server.ask("/v1/completions", body))
        again, less = server.measure("again", lambda: server.ask("/v1/completions", body))
        assert first["choices"] == again["choices"], "the second reply differs"
        print(f"{less / seconds:.4f} of the time, the same numbers")
        return 0
    query, labels = tokens(arguments.query_tokens), tokens(2)
    items = [tokens(arguments.item_tokens) for _ in range(arguments.items)]
    body = {"query": query, "label_token_ids": labels}
    together, seconds = server.measure("together", lambda: server.ask("/v1/score", {**body, "items": items})["scores"])

    def one(i):
        return server.ask("/v1/score", {**body, "items": [items[i]], "cache_salt": f"salt {i}"})["scores"][0]
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        apart, more = server.measure("apart", lambda: list(clients.map(one, range(len(items)))))
    largest = max(abs(a - b) / b for left, right in zip(together, apart) for a, b in zip(left, right))
    print(f"together / apart = {seconds / more:.4f} (1/{more / seconds:.1f}); the largest relative difference of a "
          f"probability is {largest:.1e}")
    return 0 if seconds <= arguments.most * more and largest < 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
