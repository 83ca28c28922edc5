"""What routing by prefix is worth, and what a replica's death costs: the figures of docs/serve.md."""
import http.client
import json
import os
import random
import signal
import socket
import statistics
import threading
import time

from fleet import LOOPBACK, Failure, Fleet, wait_for

GROUPS, SYSTEM_TOKENS, USERS = 6, 1000, 12
LIMIT = 120  # seconds after which a request counts as hanging
# A token is a byte. Weights are random: what is generated is nonsense, and costs what text would.
SHAPE = {"dim": 256, "hidden_dim": 688, "num_layers": 4, "num_qo_heads": 4, "num_kv_heads": 4, "vocab_size": 300,
         "max_positions": 2048}
CHUNKS = {"200 chunks: all six prompts fit": 200, "56 chunks: not all fit": 56}
# The third keeps a group at its server unless that has eight times as much to do as others on average; by default
# it goes elsewhere at half as much again, and so comes to be everywhere.
ROUTING = {"round robin": ("round_robin", ()), "cache-aware": ("cache_aware", ()),
           "cache-aware, spills late": ("cache_aware", ("--balance-rel-threshold", "8"))}


def prompts(rng, count):
    """[(group, text)]: six system prompts of 1,000 tokens, each user's own words after one of them."""
    def words(size):
        text = ""
        while len(text) < size:
            text += rng.choice("abcdefghijklmnop") * rng.randint(1, 3) + " "
        return text[:size]
    systems = [words(SYSTEM_TOKENS) for _ in range(GROUPS)]
    return [systems[rng.randrange(GROUPS)] + words(rng.randint(20, 60)) for _ in range(count)]


class Answer:
    """What became of one request, seen by its client."""

    def __init__(self):
        self.status, self.first, self.seconds = 0, None, 0.0
        self.tokens, self.cached, self.ended, self.error = 0, 0, False, ""

    def whole(self):
        return self.status == 200 and self.ended


def ask(port, prompt, max_tokens):
    """A stream, read to its end, to an error, or until LIMIT."""
    answer, start = Answer(), time.monotonic()
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=LIMIT)
    try:
        body = {"model": "measured", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer.status = response.status
        if response.status != 200:
            answer.error = response.read(300).decode(errors="replace")
        for line in response if response.status == 200 else []:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                answer.ended = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = json.dumps(event)[:300]
                break
            if event.get("choices") and answer.first is None:
                answer.first = time.monotonic() - start
            if event.get("usage"):
                answer.tokens = event["usage"]["prompt_tokens"]
                answer.cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        if not answer.ended and not answer.error:
            answer.error = "the stream broke off"
    except socket.timeout:
        answer.error = "hangs"
    except (OSError, ValueError, http.client.HTTPException) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
        answer.seconds = time.monotonic() - start
    return answer


class Users:
    """So many at once, each of whom asks again when he is answered."""

    def __init__(self, port, texts, max_tokens, users=USERS):
        self.port, self.texts, self.max_tokens = port, texts, max_tokens
        self.next, self.lock, self.answers = 0, threading.Lock(), []
        self.threads = [threading.Thread(target=self.run, daemon=True) for _ in range(users)]
        for thread in self.threads:
            thread.start()

    def run(self):
        while True:
            with self.lock:
                if self.next == len(self.texts):
                    return
                text = self.texts[self.next]
                self.next += 1
            answer = ask(self.port, text, self.max_tokens)
            with self.lock:
                self.answers.append(answer)

    def wait(self):
        for thread in self.threads:
            thread.join()
        return self.answers


def quantile(values, share):
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def compare(arguments, command, folder, say):
    texts = prompts(random.Random(arguments.seed), arguments.requests)
    say("| K/V of a replica | routing | cached part of the prompt tokens | TTFT median | 90 % | mean | seconds |")
    say("| --- | --- | --- | --- | --- | --- | --- |")
    for room, chunks in CHUNKS.items():
        for name, (policy, router) in ROUTING.items():
            fleet = Fleet(arguments.serve, arguments.smg, arguments.replicas, command + ["--chunks", str(chunks)],
                          folder, policy, 0, say, [*router, *arguments.router])
            try:
                start = time.monotonic()
                answers = Users(fleet.router.port, texts, 16).wait()
                seconds = time.monotonic() - start
            finally:
                statuses = fleet.end()
            bad = [answer.error for answer in answers if not answer.whole()]
            if bad or any(statuses):
                raise Failure(f"{len(bad)} requests were not answered ({bad[:1]}), or replicas ended with {statuses}")
            share = sum(answer.cached for answer in answers) / sum(answer.tokens for answer in answers)
            first = [1000 * answer.first for answer in answers]
            say(f"| {room} | {name} | {100 * share:.1f} % | {statistics.median(first):.0f} ms | "
                f"{quantile(first, 0.9):.0f} ms | {statistics.mean(first):.0f} ms | {seconds:.0f} |")


def count(answers):
    """How many were answered, and those that broke off after the head of their reply, those that were not answered,
    those that hang."""
    bad = [answer for answer in answers if not answer.whole()]
    hanging = [answer for answer in bad if answer.error == "hangs"]
    begun = [answer for answer in bad if answer.status == 200 and answer.error != "hangs"]
    unanswered = [answer for answer in bad if answer.status != 200 and answer.error != "hangs"]
    return len(answers) - len(bad), begun, unanswered, hanging


def kill_one(arguments, command, folder, say):
    """One is killed, three times, while all are busy; it comes back and is used again; another is told to stop."""
    rng = random.Random(arguments.seed + 1)
    fleet = Fleet(arguments.serve, arguments.smg, arguments.replicas, command + ["--chunks", "200"], folder,
                  "cache_aware", 0, say, arguments.router)
    try:
        victim = fleet.replicas[0]
        users = Users(fleet.router.port, prompts(rng, arguments.requests), 100, 2 * USERS)
        running, back = [], []
        while len(running) < 3:
            wait_for("the router uses replica 1", lambda: fleet.router.has(victim.url))
            wait_for("replica 1 is under load", lambda: victim.metric("generated_tokens_total") >= 100)
            time.sleep(rng.random() / 2)
            running.append(int(victim.metric("requests")))
            pid, killed = victim.child.process.pid, time.monotonic()
            victim.child.process.send_signal(signal.SIGKILL)
            wait_for("replica 1 comes back", lambda: victim.child.process.pid != pid and victim.is_ready())
            back.append(time.monotonic() - killed)
        answers = users.wait()
        whole, broken, unanswered, hanging = count(answers)
        say(f"kill -9 of a replica, three times, with {', '.join(map(str, running))} requests; of {len(answers)} in "
            f"all {whole} were answered, {len(broken)} that had begun to stream ended with an error, {len(unanswered)} "
            f"others were not answered, {len(hanging)} hung; it was back after {max(back):.1f} s at most")
        if unanswered or hanging:
            raise Failure(f"not answered: {unanswered[0].status if unanswered else ''} "
                          f"{unanswered[0].error if unanswered else 'hangs'}")
        wait_for("the router uses replica 1", lambda: fleet.router.has(victim.url))
        before = victim.metric("requests_accepted_total")
        answers = Users(fleet.router.port, prompts(rng, 60), 16).wait()
        used = victim.metric("requests_accepted_total") - before
        say(f"of the next {len(answers)} requests it got {used:.0f}")
        if used == 0 or not all(answer.whole() for answer in answers):
            raise Failure("the replica that came back is not used")

        leaving = fleet.replicas[1]
        users = Users(fleet.router.port, prompts(rng, 100), 100)
        wait_for("replica 2 is under load", lambda: leaving.metric("requests") >= 2)
        running = leaving.metric("requests")
        status = fleet.stop(2)
        answers = users.wait()
        say(f"replica 2 was told to stop with {running:.0f} requests running: it ended with status {status}; "
            f"{sum(answer.whole() for answer in answers)} of {len(answers)} requests were answered")
        if status != 0 or not all(answer.whole() for answer in answers):
            raise Failure(f"requests were lost: {[a.error for a in answers if not a.whole()][:1]}")
    finally:
        statuses = fleet.end()
    if any(statuses):
        raise Failure(f"replicas ended with {statuses}")


def measure(arguments, options, folder, say):
    shape = os.path.join(folder, "shape.json")
    with open(shape, "w", encoding="ascii") as file:
        json.dump(SHAPE, file)
    command = ["--random", shape, "--name", "measured", "--threads", "1", "--quiet", *options]
    say(f"{arguments.replicas} replicas of one thread, {USERS} users at once, {GROUPS} groups with a system prompt of "
        f"{SYSTEM_TOKENS} tokens, {arguments.requests} requests of 16 tokens; seed {arguments.seed}")
    compare(arguments, command, folder, say)
    kill_one(arguments, command, folder, say)
    return 0
