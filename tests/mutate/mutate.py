#!/usr/bin/env python3
"""Plants faults in the headers by seeded operators and reports which die under the ordinary tests.

All faults of a sample are compiled into one copy of each test program, guarded by run-time switches;
a fault then costs one run of the programs that reach it. docs/testing.md describes the model.

    mutate.py [--seed N] [--sample 300] [--files GLOB...] [--tests GLOB...] [--at GLOB:LINE[-LINE]...]
              [--fast] [--jobs N] [--timeout FACTOR] [--resume] [--list]

Exit: 0 at least 95 % died of what is not explained, 1 fewer, 2 the tool could not do its work, 77 no compiler.
"""
import argparse
import fnmatch
import hashlib
import json
import os
import random
import runpy
import shutil
import sys
import time
import types

import instrument
import programs
import report
import sample
from verdicts import Runner

HERE = os.path.dirname(os.path.abspath(__file__))
# The compiler refuses some faults, mostly swapped arguments: so many more are drawn than wanted.
DRAWN_PER_WANTED = 1.45


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, help="of the sample; drawn and printed if not given")
    parser.add_argument("--sample", type=int, default=300, help="faults to try (default 300)")
    parser.add_argument("--files", nargs="+", metavar="GLOB", help="headers below the include folder")
    parser.add_argument("--tests", nargs="+", metavar="GLOB", help="names of test programs")
    parser.add_argument("--fast", action="store_true", help="only the tests of ./dev test, as it builds and runs them")
    parser.add_argument("--at", nargs="+", metavar="GLOB:LINE[-LINE]", help="all faults of these lines, no sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=5, metavar="FACTOR",
                        help="of the ordinary time, after which a run counts as noticed (default 5)")
    parser.add_argument("--resume", action="store_true", help="continue the last run of the same sample")
    parser.add_argument("--list", action="store_true", help="only list the faults that could be planted")
    parser.add_argument("--config", default=os.path.join(HERE, "config.py"))
    parser.add_argument("--work", help="folder of the build (default build/mutate)")
    parser.add_argument("--cxx", default=os.environ.get("CXX", "c++"))
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 32)
    return options


class Progress:
    """One line that is written over, or, where that is not a terminal, a line now and then."""

    def __init__(self, every=30):
        self.every, self.last = every, 0.0

    def show(self, text, last=False):
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            print("\r" + text[:width].ljust(width), end="\n" if last else "", flush=True)
        elif last or time.monotonic() - self.last > self.every:
            self.last = time.monotonic()
            print(text, flush=True)


def choose(sources, compiled, options, config):
    """The sites to plant {number: Site}, in the order drawn, and what was excluded."""
    sites, excluded = sample.find_sites(sources, config)
    sites = [s for s in sites if any(s.line in lines.get(s.header, ()) for lines in compiled.values())]
    if options.at:
        sites = [s for s in sites if any(_is_at(s, place) for place in options.at)]
    else:
        sites = sample.draw(sites, options.seed, round(options.sample * DRAWN_PER_WANTED))
    return dict(enumerate(sites, 1)), excluded


def _is_at(site, place):
    pattern, lines = place.rsplit(":", 1)
    first, _, last = lines.partition("-")
    return fnmatch.fnmatch(site.header, pattern) and int(first) <= site.line <= int(last or first)


def fingerprint(root, config, options):
    """Of all that decides what is built and run."""
    digest = hashlib.sha256(repr((options.seed, options.sample, options.files, options.tests, options.at, options.fast,
                                  programs.version(options.cxx))).encode())
    for folder in (config.INCLUDE, *config.WATCHED, HERE):
        for path, folders, names in os.walk(os.path.join(root, folder)):
            folders.sort()
            for name in sorted(names):
                if not name.endswith(".pyc"):
                    with open(os.path.join(path, name), "rb") as file:
                        digest.update(name.encode() + file.read())
    return digest.hexdigest()


class Log:
    """state.json: what a run that is resumed need not do again."""

    def __init__(self, path, key, resume):
        self.path, self.state = path, {"key": key, "verdicts": {}}
        if resume and os.path.exists(path):
            with open(path) as file:
                old = json.load(file)
            if old["key"] == key:
                self.state = old
            else:
                print("nothing to resume: headers, tests or options are not those of the last run")

    def save(self):
        with open(self.path + ".new", "w") as file:
            json.dump(self.state, file, indent=1)
        os.replace(self.path + ".new", self.path)


def describe(site):
    return {"header": site.header, "line": site.line, "function": site.function, "operator": site.fault.operator,
            "original": site.original, "mutated": site.mutated}


def prepare(builder, runner, chosen, scouts, sites, write, log, progress):
    """Builds and surveys the programs, or takes over what the log knows: the refused numbers."""
    if "seconds" not in log.state:
        refused, built = set(log.state.get("refused", [])), set(log.state.get("built", []))

        def attempted(name, succeeded):
            built.update([name] if succeeded else [])
            log.state.update(refused=sorted(refused), built=sorted(built))
            log.save()
            progress.show(f"built {len(built)} of {len(chosen)} programs; "
                          f"the compiler refused {len(refused)} of {len(sites)} faults")

        todo = [program for program in chosen if program.name not in built]
        builder.build(todo, [] if built else scouts, sites, refused, write, attempted)
        progress.show(f"built {len(chosen)} programs; the compiler refused {len(refused)} of {len(sites)} faults", True)
        for number, program in enumerate(chosen, 1):
            runner.survey(program)
            progress.show(f"without a fault: {number} of {len(chosen)} programs pass")
        progress.show(f"without a fault: {len(chosen)} programs pass in {sum(runner.seconds.values()):.0f} s", True)
        log.state.update(refused_sites=[describe(sites[n]) for n in sorted(refused)], seconds=runner.seconds,
                         reached={name: sorted(r) for name, r in runner.reached.items()})
        log.save()
    runner.seconds = log.state["seconds"]
    runner.reached = {name: set(r) for name, r in log.state["reached"].items()}
    return set(log.state["refused"])


def main():
    options = parse_options()
    config = types.SimpleNamespace(**runpy.run_path(options.config))
    root = os.path.abspath(config.ROOT)
    work = os.path.abspath(options.work or os.path.join(root, "build", "mutate"))
    begin = time.monotonic()
    progress = Progress()

    builder = programs.Builder(root, work, config, options.cxx, options.jobs)
    key = fingerprint(root, config, options)
    chosen = builder.programs(options.tests, options.fast)
    sources = sample.read_headers(root, config, options.files)
    compiled = builder.compiled_lines(chosen)
    sites, excluded = choose(sources, compiled, options, config)
    print(f"seed {options.seed}: {len(sites)} faults drawn in {len(sources)} headers, {len(chosen)} test programs",
          flush=True)
    if options.list:
        for number, site in sites.items():
            print(f"{number}: {site.header}:{site.line}: {site.fault.operator}: {site.original}  ->  {site.mutated}")
        return 0

    log = Log(os.path.join(work, "state.json"), key, options.resume)
    runner = Runner(builder, config, options.timeout)
    scouts = builder.scouts(chosen, compiled, sites)
    refused = prepare(builder, runner, chosen, scouts, sites, lambda live: instrument.write_headers(
        os.path.join(root, config.INCLUDE), builder.include, sources, live), log, progress)

    planted = {n: s for n, s in sites.items() if n not in refused}
    if not options.at:
        planted = dict(list(planted.items())[: options.sample])
    verdicts = {int(n): v for n, v in log.state["verdicts"].items()}
    todo = {n: s for n, s in planted.items() if n not in verdicts}
    started, before = time.monotonic(), len(verdicts)

    def finished(number, verdict):
        verdicts[number] = verdict
        log.state["verdicts"][str(number)] = {**verdict, **describe(planted[number])}
        log.save()
        passed = time.monotonic() - started
        left = passed / (len(verdicts) - before) * (len(planted) - len(verdicts))
        dead = sum(v["verdict"] in report.DEAD for v in verdicts.values())
        progress.show(f"{len(verdicts)} of {len(planted)} faults, {dead} died, "
                      f"{len(verdicts) - dead} did not; {left / 60:.0f} min left")

    runner.run_all(todo, chosen, options.jobs, finished)
    progress.show(f"{len(verdicts)} faults tried", True)
    seconds = log.state.get("spent", 0) + time.monotonic() - begin
    log.state["spent"] = seconds
    log.save()
    shutil.rmtree(os.path.join(work, "tmp"), ignore_errors=True)

    result = report.text(planted, verdicts, [sites[n] for n in sorted(refused)], excluded, config.LEFT_OUT_TESTS,
                         config, options.seed, seconds)
    with open(os.path.join(work, "report.txt"), "w") as file:
        file.write(result + "\n")
    print("\n" + result)
    if not options.at and len(planted) < options.sample:
        print(f"only {len(planted)} of the {options.sample} faults wanted could be planted")
    return 0 if report.rate(planted, verdicts, config) >= config.LEAST_RATE else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except programs.Failed as failure:
        print(f"\nFAILED: {failure}")
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; --resume with the same --seed continues")
        sys.exit(2)
