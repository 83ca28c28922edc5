#!/usr/bin/env python3
"""A subscriber of `serve run --kv-events` that knows nothing but the format that vLLM publishes.

usage: kv_events.py SERVE [--requests N] [--seed S]      needs the packages msgspec and pyzmq

Clients send requests, one in ten with a salt, to a server with few chunks, so that cache is evicted all the time,
to little host memory and a small directory. The subscriber gets stored and removed blocks of each medium; it loses
one message in 30, and asks for what it missed. After each third of the requests it must hold exactly the server's
set of full chunks (/kv_chunks, which the server finds by matching, not from its events), of the medium DISK the
blocks that the files say they are of, and nothing of a tenant with a salt. Between the thirds the server is killed
and starts again with the same directory (of whose files only those that were looked for are published again), then it is
terminated and starts again with another one, with fewer messages kept than the subscriber will miss, and with events as
maps, which vLLM writes from 0.32 on."""
import argparse
import json
import os
import random
import signal
import socket
import struct
import sys
import tempfile
import threading
import time

from own_python import need

need("events", "./dev events", "msgspec", "zmq")
import msgspec
import zmq

from soak import LIMIT, SHAPE, Failure, Server, check

CHUNK = 8
MEDIA = ("GPU", "CPU", "DISK")
SALTED = (298,) * 4  # how prompts with a salt begin, and no other


# What vLLM publishes: arrays as its documentation shows them, and maps as vLLM 0.32 declares them, which leave out what
# has its default.
class StoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class StoredMap(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class RemovedMap(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class ClearedMap(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    pass


class Arrays(msgspec.Struct, array_like=True):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int | None = None


class Maps(msgspec.Struct, array_like=True):
    ts: float
    events: list[StoredMap | RemovedMap | ClearedMap]
    data_parallel_rank: int | None = None


CLEARED, STORED = (ClearedArray, ClearedMap), (StoredArray, StoredMap)
DECODERS = {list: msgspec.msgpack.Decoder(Arrays), dict: msgspec.msgpack.Decoder(Maps)}


def events_of(payload):
    """Each message is of one form, in which it is checked."""
    (form,) = {type(event) for event in msgspec.msgpack.decode(payload)[1]}
    events = DECODERS[form].decode(payload).events
    for event in events if form is dict else []:
        check(isinstance(event, ClearedMap) or event.group_idx == 0, "a block of no group")
        check(not isinstance(event, StoredMap) or event.kv_cache_spec_kind == "full_attention", "a block of no kind")
    return form, events


class Subscriber:
    """Of each medium the blocks by their hashes: (the hash before, tokens)."""

    def __init__(self, port, rng):
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        self.events.connect(f"tcp://127.0.0.1:{port}")
        self.again_address = f"tcp://127.0.0.1:{port + 1}"
        self.rng = rng
        self.media, self.last = {medium: {} for medium in MEDIA}, -1
        self.loses = True
        self.names = {}  # all blocks that it ever got: a slow medium may lose what another block extends
        self.counts = dict.fromkeys(["messages", "arrays", "maps", "lost", "replays", "cleared"], 0)
        self.counts |= dict.fromkeys([f"{what} in {m}" for m in MEDIA for what in ("stored", "removed")], 0)

    def listen(self, milliseconds):
        """Takes what comes, until nothing has for so long."""
        while self.events.poll(milliseconds):
            topic, number, payload = self.events.recv_multipart()
            check(topic == b"kv-events", f"a message of topic {topic}")
            number = int.from_bytes(number, "big")
            if self.loses and self.rng.random() < 1 / 30:
                self.counts["lost"] += 1
                continue
            if number > self.last + 1:
                self.replay()
            if number == self.last + 1:
                self.apply(number, payload)

    def replay(self):
        """Asks for all after the last that it has."""
        self.counts["replays"] += 1
        again = self.context.socket(zmq.DEALER)
        again.setsockopt(zmq.LINGER, 0)
        again.connect(self.again_address)
        again.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while True:
            check(again.poll(LIMIT * 1000), "no answer to what was missed")
            _, number, payload = again.recv_multipart()
            if not payload:
                break
            number = int.from_bytes(number, "big")
            if number > self.last:
                self.apply(number, payload)
        again.close()

    def apply(self, number, payload):
        form, events = events_of(payload)
        self.counts["arrays" if form is list else "maps"] += 1
        for event in events:
            if isinstance(event, CLEARED):
                for blocks in self.media.values():
                    blocks.clear()
                self.counts["cleared"] += 1
                continue
            check(event.medium in self.media, f"the medium {event.medium}")
            blocks = self.media[event.medium]
            if isinstance(event, STORED):
                self.store(event, blocks)
            else:
                for name in event.block_hashes:
                    check(name in blocks, f"removed from {event.medium}, and not there")
                    del blocks[name]
            what = "stored" if isinstance(event, STORED) else "removed"
            self.counts[f"{what} in {event.medium}"] += len(event.block_hashes)
        self.counts["messages"] += 1
        self.last = number

    def store(self, event, blocks):
        check(event.block_size == CHUNK, "a block of another size")
        check(len(event.token_ids) == CHUNK * len(event.block_hashes), "tokens of all blocks")
        parent = event.parent_block_hash
        check(parent is None or parent in blocks or event.medium != "GPU", "a block before its parent")
        for i, name in enumerate(event.block_hashes):
            check(name not in blocks, f"a block twice in {event.medium}")
            tokens = tuple(event.token_ids[i * CHUNK:(i + 1) * CHUNK])
            check(parent is not None or tokens[:4] != SALTED, "tokens of a tenant with a salt")
            blocks[name] = (parent, tokens)
            check(self.names.setdefault(name, (parent, tokens)) == (parent, tokens), "one name for two blocks")
            parent = name


class Paths:
    """Numbers of paths of blocks: equal for equal tokens from the start, whatever the names are."""

    def __init__(self, subscriber):
        self.known = {}  # (number of the path before, tokens): number
        self.subscriber, self.numbers = subscriber, {}

    def number(self, before, tokens):
        return self.known.setdefault((before, tokens), len(self.known))

    def of_tokens(self, tokens):
        at = -1
        for begin in range(0, len(tokens), CHUNK):
            at = self.number(at, tokens[begin:begin + CHUNK])
        return at

    def of_name(self, name):
        """None if it never got the block that it extends."""
        path = []
        while name is not None and name not in self.numbers:
            if name not in self.subscriber.names:
                return None
            path.append(name)
            name = self.subscriber.names[name][0]
        for one in reversed(path):
            parent, tokens = self.subscriber.names[one]
            self.numbers[one] = self.number(-1 if parent is None else self.numbers[parent], tokens)
        return self.numbers[path[0] if path else name]


def identity_of(head):
    """Whose tokens a record has: the fourth text of its head, behind eleven numbers; formats of what lies beside K/V
    follow it."""
    at = 11 * 8
    for _ in range(4):
        (size,) = struct.unpack_from("=Q", head, at)
        text, at = head[at + 8:at + 8 + size], at + 8 + size
    return text


def tokens_in_files(directory):
    """Of which tokens each record is, by what it says itself (include/chunkattn/tiers/detail/record.hpp), without
    those of tenants with a salt."""
    paths = []
    for entry in os.scandir(directory):
        if not entry.name.endswith(".kv"):
            continue
        with open(entry.path, "rb") as file:
            _, head_bytes, token_bytes, _, _, _ = struct.unpack("=6Q", file.read(48))
            head, tokens = file.read(head_bytes), file.read(token_bytes)
        if identity_of(head) == b"nobody":
            paths.append(struct.unpack(f"={token_bytes // 4}i", tokens))
    return paths


def compare_when_idle(subscriber, server, directory, is_new):
    """What compare() finds when the server's threads have moved what they were asked to move."""
    deadline = time.monotonic() + 60
    while True:
        subscriber.listen(200)
        subscriber.replay()
        try:
            return compare(subscriber, server, directory, is_new)
        except Failure:
            if time.monotonic() > deadline:
                raise


def compare(subscriber, server, directory, is_new):
    """Both sets, with paths of tokens instead of names. `is_new`: all files there were written by this server."""
    state = json.loads(server.get("/kv_chunks"))
    check(state["chunk_size"] == CHUNK, "chunks of another size")
    paths = Paths(subscriber)
    chunks = []
    for parent, tenant, tokens in state["chunks"]:
        chunks.append(None if tenant else paths.number(-1 if parent < 0 else chunks[parent], tuple(tokens)))
    expected = {n for n in chunks if n is not None}
    held = {paths.of_name(name) for name in subscriber.media["GPU"]}
    check(None not in held, "a block whose start is nowhere")
    check(len(held) == len(subscriber.media["GPU"]), "two names for one block")
    check(held == expected, f"held {len(held)} blocks, of which {len(held - expected)} are not cached; "
          f"{len(expected - held)} of {len(expected)} are missing")
    check(expected, "nothing is cached")

    files = {paths.of_tokens(tokens) for tokens in tokens_in_files(directory)}
    on_disk = [paths.of_name(name) for name in subscriber.media["DISK"]]
    known = {n for n in on_disk if n is not None}
    unknown = on_disk.count(None)  # one that began with a snapshot never got what they extend
    check(len(known) + unknown == len(on_disk), "two names for one block in files")
    check(known <= files, f"{len(known - files)} of {len(known)} blocks are in no file")
    check(not is_new or len(on_disk) == len(files), f"held {len(on_disk)} blocks in files; there are {len(files)}")
    check(known and subscriber.media["CPU"], "nothing is in tiers")
    return (f"{len(expected)} blocks, as in the server, which has {chunks.count(None)} more of tenants with a salt; "
            f"{len(subscriber.media['CPU'])} in host memory, {len(on_disk)} of {len(files)} in files")


class Clients:
    def __init__(self, server, seed, count):
        self.server, self.left, self.lock = server, count, threading.Lock()
        self.failures = []
        self.threads = [threading.Thread(target=self.run, args=(seed * 1000 + i,), daemon=True) for i in range(8)]
        for thread in self.threads:
            thread.start()

    def run(self, seed):
        rng = random.Random(seed)
        connection = self.server.connect()
        while True:
            with self.lock:
                if self.left == 0:
                    return
                self.left -= 1
            family = rng.randrange(12)
            shared = [(family * 37 + i) % 255 + 1 for i in range(10 + 9 * family)]
            prompt = shared[:rng.randint(5, len(shared))] + [rng.randint(1, 255) for _ in range(rng.randint(1, 40))]
            body = {"max_tokens": rng.randint(1, 30), "temperature": 1, "seed": rng.randrange(1 << 30),
                    "n": rng.choice([1, 1, 1, 2])}
            if rng.random() < 0.1:
                body["cache_salt"] = f"salt {rng.randrange(3)}"
                prompt = [*SALTED, *prompt]
            connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt, **body}),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                self.failures.append(text)

    def busy(self):
        return any(thread.is_alive() for thread in self.threads)


def free_ports():
    """Two that follow each other."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            if port >= 65000:
                continue
            try:
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def run(arguments):
    rng = random.Random(arguments.seed)
    port = free_ports()
    with tempfile.TemporaryDirectory() as folder:
        shape = os.path.join(folder, "shape.json")
        with open(shape, "w", encoding="ascii") as file:
            json.dump(SHAPE, file)
        command = [arguments.serve, "run", "--random", shape, "--products", "own", "--chunk-size", str(CHUNK),
                   "--chunks", "400", "--threads", "1", "--kv-events", str(port), "--tier-memory", "1",
                   "--tier-dir-mib", "1", "--tier-dir"]
        subscriber = Subscriber(port, rng)
        start = time.monotonic()
        for third in range(3):
            directory = os.path.join(folder, "first" if third < 2 else "second")
            server = Server(command + [directory] + (["--kv-batches", "40", "--kv-form", "maps"] if third == 2 else []))
            count = arguments.requests // 3 + (arguments.requests % 3 if third == 2 else 0)
            clients = Clients(server, arguments.seed + third, count)
            while clients.busy():
                subscriber.listen(20)
                if third == 2 and rng.random() < 0.02:  # away for a while
                    time.sleep(0.5)
                    while subscriber.events.poll(0):
                        subscriber.events.recv_multipart()
            check(not clients.failures, f"refused: {clients.failures[:1]}")
            print(f"after {count} requests: {compare_when_idle(subscriber, server, directory, third != 1)}", flush=True)
            subscriber.loses = third < 2  # there is no replay of the last message of a server that ends
            if third == 0:
                server.end(signal.SIGKILL)
            else:
                check(server.end(signal.SIGTERM) == 0, "the server did not end well")
        subscriber.listen(500)
        check(not any(subscriber.media.values()), "a server that ends says that nothing is cached")
        counts = ", ".join(f"{value} {name}" for name, value in subscriber.counts.items())
        print(f"{arguments.requests} requests in {time.monotonic() - start:.0f} s; {counts}")
        for name, value in subscriber.counts.items():
            check(value > 0, f"nothing was {name}")
        check(subscriber.counts["cleared"] >= 3, "each start clears")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("serve")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    try:
        run(arguments)
    except Failure as failure:
        print(f"FAILED: {failure}")
        sys.exit(1)


if __name__ == "__main__":
    main()
