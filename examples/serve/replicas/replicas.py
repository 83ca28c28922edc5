#!/usr/bin/env python3
"""Several `serve run` behind SMG's cache-aware router, at one address, until Ctrl-C.

usage: replicas.py SERVE SMG N [--port P] [--policy NAME] [--router=OPTION] [--measure] [-- OPTIONS OF serve run]

While it runs it reads commands: `stop K` takes replica K out of the router and lets it finish, `start K` brings it
back, `status` says who is there. --measure runs the comparison of docs/serve.md instead."""
import argparse
import os
import signal
import sys
import tempfile

from fleet import Failure, Fleet
from measure import measure


def say(text):
    print(text, flush=True)


def commands(fleet):
    """From the keyboard, until its end."""
    for line in sys.stdin:
        words = line.split()
        try:
            if words[:1] == ["status"]:
                for replica in fleet.replicas:
                    in_use = "in use" if fleet.router.has(replica.url) else "not in use"
                    say(f"replica {replica.number} at {replica.url}: {'runs' if replica.runs() else 'is stopped'}, "
                        f"{in_use}")
            elif len(words) == 2 and words[0] in ("stop", "start") and words[1].isdigit() and \
                    1 <= int(words[1]) <= len(fleet.replicas):
                number = int(words[1])
                if words[0] == "stop":
                    status = fleet.stop(number)
                    say(f"replica {number} has finished, with status {status}")
                else:
                    fleet.start(number)
                    say(f"replica {number} is in use")
            elif words:
                say(f"stop K, start K (K from 1 to {len(fleet.replicas)}) or status; Ctrl-C ends all")
        except Failure as failure:
            say(f"failed: {failure}")


def interrupted(*_):
    raise KeyboardInterrupt


def run(arguments, options, folder):
    fleet = Fleet(arguments.serve, arguments.smg, arguments.replicas, options, folder, arguments.policy,
                  arguments.port, say, arguments.router)
    try:
        for replica in fleet.replicas:
            say(f"replica {replica.number} at {replica.url}")
        say(f"serving  at http://127.0.0.1:{fleet.router.port}: OpenAI's API, {arguments.policy}")
        say("commands stop K, start K, status; Ctrl-C ends all")
        commands(fleet)
        while True:  # no terminal: until a signal
            signal.pause()
    except KeyboardInterrupt:
        say("ends: what runs is finished")
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends at once, and all children
        statuses = fleet.end()
        say("all have ended" if not any(statuses) else f"ended with {statuses}")
        return int(any(statuses))


def main():
    own, options = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, options = own[:at], own[at + 1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("serve")
    parser.add_argument("smg")
    parser.add_argument("replicas", type=int)
    parser.add_argument("--port", type=int, default=8000, help="of the router; 0: any that is free")
    parser.add_argument("--policy", default="cache_aware")
    parser.add_argument("--router", action="append", default=[], metavar="OPTION",
                        help="of smg launch: --router=--balance-rel-threshold=3")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--requests", type=int, default=600, help="of a measurement")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(own)
    if not 1 <= arguments.replicas <= 64:
        parser.error(f"replicas = {arguments.replicas}: expected 1 to 64")
    signal.signal(signal.SIGTERM, interrupted)
    signal.signal(signal.SIGINT, interrupted)
    with tempfile.TemporaryDirectory(prefix="replicas.") as folder:
        try:
            if arguments.measure:
                return measure(arguments, options, folder, say)
            return run(arguments, options, folder)
        except Failure as failure:
            say(f"FAILED: {failure}")
            for name in sorted(os.listdir(folder)):
                if name.endswith(".log"):
                    with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as log:
                        say(f"--- the end of {name}\n" + "".join(log.readlines()[-15:]))
            return 1


if __name__ == "__main__":
    sys.exit(main())
