"""Servers on one machine behind SMG's router, as child processes: starts, watches and ends them."""
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time

LOOPBACK = "127.0.0.1"


class Failure(Exception):
    pass


def free_port():
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        return one.getsockname()[1]


def end_with_parent():
    """In a child: it ends when this process does, however that comes; Ctrl-C is the parent's to handle."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def request(port, method, path, body=None, limit=10):
    """Status and body; status 0 where there is no answer."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=limit)
    try:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def wait_for(what, condition, limit=120):
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise Failure(f"{what}: not within {limit} s")
        time.sleep(0.05)


class Child:
    def __init__(self, command, log):
        self.log = open(log, "ab")  # closed with the process
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                                        preexec_fn=end_with_parent)

    def runs(self):
        return self.process.poll() is None

    def ask_to_end(self):
        if self.runs():
            self.process.send_signal(signal.SIGTERM)

    def wait(self, limit=60):
        """Its exit status; killed where it does not end."""
        try:
            status = self.process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self.log.close()
        return status


class Replica:
    """One `serve run`, always at the same port."""

    def __init__(self, number, command, folder):
        self.number, self.folder = number, folder
        self.port = free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self.command = command + ["--port", str(self.port)]
        self.child = None
        self.wanted = False

    def start(self):
        self.child = Child(self.command, os.path.join(self.folder, f"replica{self.number}.log"))
        self.wanted = True

    def is_ready(self):
        return request(self.port, "GET", "/health", limit=5)[0] == 200

    def runs(self):
        return self.child is not None and self.child.runs()

    def metric(self, name):
        for line in request(self.port, "GET", "/metrics")[1].splitlines():
            if line.startswith("chunkattn_" + name + " "):
                return float(line.split()[1])
        return 0.0


class Router:
    """SMG. Takes workers in and out by its API, and finds by their /health which of them answer."""

    def __init__(self, smg, port, policy, urls, folder, options=()):
        self.port = port or free_port()
        self.child = Child([smg, "launch", "--host", LOOPBACK, "--port", str(self.port), "--policy", policy,
                            "--worker-urls", *urls,
                            "--health-check-interval-secs", "1", "--health-check-timeout-secs", "2",
                            "--health-failure-threshold", "1", "--health-success-threshold", "1",
                            "--worker-startup-check-interval", "1", "--load-monitor-interval", "2",
                            "--retry-max-retries", "8", "--retry-initial-backoff-ms", "50",
                            "--retry-max-backoff-ms", "500", "--cb-timeout-duration-secs", "2",
                            "--cb-success-threshold", "1", "--no-remove-unhealthy-workers",
                            "--prometheus-port", str(free_port()), "--prometheus-host", LOOPBACK,
                            "--shutdown-grace-period-secs", "30", "--log-level", "warn", *options],
                           os.path.join(folder, "router.log"))

    def workers(self):
        status, text = request(self.port, "GET", "/workers")
        return json.loads(text)["workers"] if status == 200 else []

    def has(self, url):
        return any(worker["url"] == url and worker["is_healthy"] for worker in self.workers())

    def add(self, url):
        status, text = request(self.port, "POST", "/workers", {"url": url})
        if status not in (200, 201, 202):
            raise Failure(f"the router does not take {url}: {status} {text}")
        wait_for(f"the router uses {url}", lambda: self.has(url))

    def remove(self, url):
        """Afterwards it sends nothing there; what runs continues."""
        for worker in self.workers():
            if worker["url"] == url:
                status, text = request(self.port, "DELETE", "/workers/" + worker["id"])
                if status not in (200, 202, 204):
                    raise Failure(f"the router keeps {url}: {status} {text}")
        wait_for(f"the router is without {url}",
                 lambda: all(worker["url"] != url for worker in self.workers()))


class Fleet:
    def __init__(self, serve, smg, count, options, folder, policy="cache_aware", port=0, say=print, router=()):
        self.say = say
        self.lock = threading.Lock()  # of who starts and ends replicas
        self.replicas = [Replica(i + 1, [serve, "run", *options], folder) for i in range(count)]
        self.router = None
        self.ending = False
        try:
            for replica in self.replicas:
                replica.start()
            for replica in self.replicas:
                wait_for(f"replica {replica.number} starts", lambda r=replica: self.check_start(r))
            self.router = Router(smg, port, policy, [replica.url for replica in self.replicas], folder, router)
            for replica in self.replicas:
                wait_for(f"the router uses replica {replica.number}", lambda r=replica: self.router.has(r.url))
        except BaseException:
            self.end()
            raise
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()

    @staticmethod
    def check_start(replica):
        if not replica.runs():
            raise Failure(f"replica {replica.number} has ended: see replica{replica.number}.log")
        return replica.is_ready()

    def watch(self):
        """One that has died comes back at its port, where the router finds it again."""
        while not self.ending:
            for replica in self.replicas:
                with self.lock:
                    if self.ending or not replica.wanted or replica.runs():
                        continue
                    self.say(f"replica {replica.number} has died; it starts again")
                    replica.start()
            time.sleep(0.2)

    def stop(self, number):
        """Out of the router first, then it finishes what runs."""
        replica = self.replicas[number - 1]
        self.router.remove(replica.url)
        with self.lock:
            replica.wanted = False
        replica.child.ask_to_end()
        return replica.child.wait()

    def start(self, number):
        replica = self.replicas[number - 1]
        with self.lock:
            if not replica.runs():
                replica.start()
        wait_for(f"replica {number} starts", lambda: self.check_start(replica))
        self.router.add(replica.url)

    def end(self):
        """The router first, which finishes what runs; then the replicas."""
        with self.lock:
            self.ending = True
        if self.router is not None:
            self.router.child.ask_to_end()
            self.router.child.wait()
        running = [replica.child for replica in self.replicas if replica.runs()]
        for child in running:
            child.ask_to_end()  # once: a second signal would cut short what runs
        return [child.wait() for child in running]
