#!/usr/bin/env python3
"""Thousands of requests at overload against `serve run`, over loopback, with nothing but Python's library.

usage: soak.py SERVE [--requests N] [--model FILE | --random SHAPE] [--workers N] [--seed N]

Each of 200 prompts is served alone first. Then they come at once, in two tenants, with a third of the chunks
that they would like; one request in ten is malformed, one in ten goes away half-way. Every request must be
answered or refused with a reason, each greedy text must be the one that was served alone (--mode
batch_invariant), no chunk may be in use at the end, and memory may not grow. Then the server is killed while it
serves, started again, and terminated."""
import argparse
import atexit
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

SHAPE = {"dim": 64, "hidden_dim": 172, "num_layers": 2, "num_qo_heads": 8, "num_kv_heads": 4,
         "vocab_size": 300, "max_positions": 1024}
CHUNK = 8  # tokens: many chunks, so that many things happen to them
LIMIT = 300  # seconds that anything may take before it counts as hanging

WORDS = ("the a tree of chunks keeps what prompts have in common once and reads it once for all who share it "
         "so that a long system prompt costs little however many users talk below it at the same time").split()


class Failure(Exception):
    pass


def check(good, message):
    if not good:
        raise Failure(message)


class Server:
    """`serve run` as a child, on a free port."""

    def __init__(self, command, port=0):
        self.process = subprocess.Popen(command + ["--port", str(port), "--quiet"], stdout=subprocess.PIPE,
                                        text=True)
        atexit.register(self.process.kill)  # a check that fails leaves nothing behind that holds its output open
        self.port = None
        for line in self.process.stdout:
            if line.startswith("serving") and "http://" in line:
                self.port = int(line.split("http://")[1].split()[0].rsplit(":", 1)[1])
            if line.startswith("stop"):
                break
        check(self.port is not None, "the server did not start")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()  # never a full pipe

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)

    def get(self, path):
        connection = self.connect()
        connection.request("GET", path)
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def metric(self, name):
        for line in self.get("/metrics").splitlines():
            if line.startswith("chunkattn_" + name + " "):
                return float(line.split()[1])
        raise Failure("there is no metric " + name)

    def resident_kib(self):
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    def end(self, by):
        self.process.send_signal(by)
        return self.process.wait(timeout=LIMIT)


def make_prompts(rng, count):
    """In families: all of one begin alike."""
    def words(n):
        return " ".join(rng.choice(WORDS) for _ in range(n))
    families = [words(15) for _ in range(10)]
    return [f"{families[i % 10]} #{i} {words(rng.randint(3, 25))}" for i in range(count)]


def completion(connection, body):
    """Status, reply and its text. A stream is put together as a whole."""
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    if response.status != 200 or not body.get("stream"):
        reply = json.loads(data)
        return response.status, reply, [c["text"] for c in reply.get("choices", [])]
    events = [e[6:] for e in data.decode().split("\n\n") if e]
    check(events and events[-1] == "[DONE]", "a stream did not end with [DONE]")
    texts = [""] * body.get("n", 1)
    ends = 0
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["text"]
            ends += choice["finish_reason"] is not None
    check(ends == len(texts), "a stream lacks a finish_reason")
    return 200, {}, texts


MALFORMED = [b"", b"{", b"[]", b"nonsense", b"[" * 5000, b'{"prompt": "\xff"}', b'{"prompt": 5}', b'{"prompt": []}',
             b'{"prompt": "a", "n": 1e400}', b'{"prompt": "a", "n": -1}', b'{"prompt": "a", "max_tokens": 1e18}',
             b'{"prompt": "a", "max_tokens": "many"}', b'{"prompt": [1, 2, 99999999]}', b'{"prompt": "\\ud800"}',
             b'{"prompt": "a", "stop": [1]}', b'{"prompt": "a", "model": "no such"}']


class Soak:
    def __init__(self, arguments, command):
        self.arguments = arguments
        self.command = command
        self.rng = random.Random(arguments.seed)
        self.prompts = make_prompts(self.rng, 200)
        self.max_tokens = [self.rng.randint(1, 64) for _ in self.prompts]
        self.alone, self.tokens = [], []
        self.lock = threading.Lock()
        self.counts = dict.fromkeys(["answered", "malformed refused", "gone half-way", "refused for now"], 0)
        self.failures = []
        self.memory = []  # (requests, KiB)
        self.next = 0

    def body(self, i, stream=False):
        return {"prompt": self.prompts[i], "max_tokens": self.max_tokens[i], "temperature": 0, "stream": stream}

    def serve_alone(self):
        server = Server(self.command + ["--chunks", "4000"])
        connection = server.connect()
        for i in range(len(self.prompts)):
            status, reply, texts = completion(connection, self.body(i))
            check(status == 200, f"alone: {status} {reply}")
            self.alone.append(texts[0])
            self.tokens.append(reply["usage"]["total_tokens"])
        connection.close()
        check(server.end(signal.SIGTERM) == 0, "SIGTERM: the exit status is not 0")

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def one(self, server, connection, rng):
        """Returns the connection to go on with."""
        kind, i = rng.random(), rng.randrange(len(self.prompts))
        if kind < 0.1:
            self.send_malformed(server, rng)
        elif kind < 0.2:
            self.go_away(server, i, rng)
        else:
            body = self.body(i, stream=rng.random() < 0.5)
            body["cache_salt"] = rng.choice(["one tenant", "another"])
            if rng.random() < 0.1:
                body["n"] = 2
            status, reply, texts = completion(connection, body)
            while status in (429, 503):
                self.count("refused for now")
                check("error" in reply, f"{status} without a reason")
                time.sleep(0.02)
                status, reply, texts = completion(connection, body)
            check(status == 200, f"{status} {reply}")
            for text in texts:
                check(text == self.alone[i], f"prompt {i}: {text!r}, alone {self.alone[i]!r}")
            self.count("answered")
        return connection

    def send_malformed(self, server, rng):
        body = rng.choice(MALFORMED)
        connection = server.connect()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        reply = json.loads(response.read())
        connection.close()
        check(400 <= response.status < 500 and reply["error"]["message"], f"{body[:50]}: {response.status} {reply}")
        self.count("malformed refused")

    def go_away(self, server, i, rng):
        body = dict(self.body(i, stream=True), max_tokens=64)
        text = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                        b"Content-Length: %d\r\n\r\n%s" % (len(text), text))
            wanted, seen = rng.randint(0, 30), b""
            while seen.count(b"data: ") < wanted and b"[DONE]" not in seen and b"\"error\"" not in seen:
                got = raw.recv(4096)
                check(got, "a stream was cut off")
                seen += got
        self.count("gone half-way")

    def work(self, server, worker):
        rng = random.Random(self.arguments.seed * 1000 + worker)
        connection = server.connect()
        while not self.failures:
            with self.lock:
                if self.next == self.arguments.requests:
                    break
                self.next += 1
                done = self.next
            if done % 50 == 0:
                with self.lock:
                    self.memory.append((done, server.resident_kib()))
            try:
                connection = self.one(server, connection, rng)
            except Exception as error:  # pylint: disable=broad-except
                self.failures.append(f"request {done}: {type(error).__name__}: {error}")
        connection.close()

    def overload(self):
        wanted = sum((t + CHUNK - 1) // CHUNK for t in self.tokens) / len(self.tokens) * self.arguments.workers
        chunks = max(int(wanted / 3), max(self.tokens) // CHUNK + 12)
        slots = max(1, self.arguments.workers * 4 // 5)
        print(f"overload  {self.arguments.workers} clients, {slots} slots, {chunks} of {wanted:.0f} chunks")
        server = Server(self.command + ["--chunks", str(chunks), "--max-requests", str(slots)])
        start = time.monotonic()
        workers = [threading.Thread(target=self.work, args=(server, w)) for w in range(self.arguments.workers)]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            workers[0].join(timeout=1)
            for worker in workers:
                worker.join(timeout=0.02)
            self.progress(start)
        print()
        check(not self.failures, "\n".join(self.failures[:5]))
        check(server.process.poll() is None, "the server has ended")
        return server, time.monotonic() - start

    def progress(self, start):
        resident = f", {self.memory[-1][1] / 1024:.0f} MiB" if self.memory else ""
        end = "\r" if sys.stdout.isatty() else "\n"
        print(f"          {self.next} of {self.arguments.requests} requests, {time.monotonic() - start:.0f} s"
              f"{resident}", end=end, flush=True)

    def check_the_end(self, server):
        limit = time.monotonic() + LIMIT
        while server.metric("requests") > 0 or server.metric('chunks{state="used"}') > 0:
            check(time.monotonic() < limit, "chunks are in use, and no request is served")
            time.sleep(0.05)
        for name in ["preemptions_total", "swaps_total", "generated_tokens_total", "cached_prompt_tokens_total",
                     "prompt_tokens_total"]:
            print(f"          {int(server.metric(name))} {name.replace('_total', '').replace('_', ' ')}")
        if self.arguments.requests >= 3000:  # fewer do not cover everything for certain
            check(server.metric("preemptions_total") > 0, "there was no preemption")
            check(server.metric("swaps_total") > 0, "nothing was swapped")

    def slope(self):
        """KiB per request over the second half, by least squares."""
        half = [(x, y) for x, y in self.memory if x > self.arguments.requests / 2]
        if len(half) < 3:
            return 0.0
        mean_x, mean_y = (sum(v) / len(half) for v in zip(*half))
        return (sum((x - mean_x) * (y - mean_y) for x, y in half) /
                sum((x - mean_x) ** 2 for x, _ in half))

    def kill_and_restart(self, server):
        """SIGKILL in the middle; the next one takes the same port at once, and SIGTERM ends it well."""
        for by in (signal.SIGKILL, signal.SIGTERM):
            streams = [server.connect() for _ in range(4)]
            for i, connection in enumerate(streams):
                body = dict(self.body(i, stream=True), max_tokens=64)
                connection.request("POST", "/v1/completions", json.dumps(body),
                                   {"Content-Type": "application/json"})
                connection.getresponse().read(20)  # it is being served
            status = server.end(by)
            for connection in streams:
                connection.close()
            if by == signal.SIGTERM:
                check(status == 0, f"SIGTERM: exit status {status}")
                return
            server = Server(self.command, server.port)
            connection = server.connect()
            for i in range(8):
                _, _, texts = completion(connection, self.body(i))
                check(texts == [self.alone[i]], "another text than before the restart")
            connection.close()

    def end_at_once(self):
        """A second SIGINT ends what a first one lets end."""
        server = Server(self.command + ["--chunks", "4000", "--drain", str(LIMIT)])
        streams = [server.connect() for _ in range(8)]  # work for seconds, also on a fast machine
        body = json.dumps(dict(self.body(0, stream=True), max_tokens=700, n=16))
        for connection in streams:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = streams[0].getresponse()
        check(response.status == 200, f"a long answer: {response.status}")
        response.read(20)  # it is being served
        server.process.send_signal(signal.SIGINT)
        while "closing" not in server.get("/health"):  # two that are pending would be one
            time.sleep(0.01)
        response.read(20_000)  # it continues
        check(server.process.poll() is None, "one SIGINT ended what was being served")
        check(server.end(signal.SIGINT) == 0, "SIGINT: the exit status is not 0")
        check(b'"cancelled"' in response.read(), "a second SIGINT did not end what was being served")
        for connection in streams:
            connection.close()

    def run(self):
        print(f"soak      {self.arguments.requests} requests, --seed {self.arguments.seed}", flush=True)
        start = time.monotonic()
        self.serve_alone()
        print(f"alone     {len(self.alone)} prompts in {time.monotonic() - start:.0f} s", flush=True)
        server, seconds = self.overload()
        try:
            print("done      " + ", ".join(f"{n} {what}" for what, n in self.counts.items()))
            print(f"          {self.arguments.requests / seconds:.0f} requests per second")
            self.check_the_end(server)
            slope = self.slope()
            if self.memory:
                print(f"memory    {self.memory[-1][1] / 1024:.1f} MiB; {slope:+.3f} KiB per request over the "
                      "second half")
            if self.arguments.requests >= 3000 and not self.arguments.no_memory:
                check(slope < 1, "memory grows by more than 1 KiB per request")
            self.kill_and_restart(server)
            self.end_at_once()
            print("ends      killed and started again; ended by SIGTERM, and at once by two SIGINT")
        finally:
            server.process.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("serve")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=48, help="clients at once")
    parser.add_argument("--model", default="", help="a GGUF file; else a small model with random weights")
    parser.add_argument("--random", default="", help="a shape for random weights")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "little"))
    parser.add_argument("--no-memory", action="store_true", help="memory may grow: a sanitizer keeps it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = os.path.join(folder, "shape.json")
        with open(shape, "w", encoding="ascii") as file:
            json.dump(SHAPE, file)
        model = ["--model", arguments.model] if arguments.model else ["--random", arguments.random or shape]
        command = [arguments.serve, "run", *model, "--mode", "batch_invariant", "--chunk-size", str(CHUNK)]
        try:
            Soak(arguments, command).run()
        except Failure as failure:
            print(f"FAILED: {failure}", file=sys.stderr)
            return 1
    print("soak      passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
