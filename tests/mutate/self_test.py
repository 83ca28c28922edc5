#!/usr/bin/env python3
"""The tool's test of itself: plants every fault in toy/include/toy.hpp and compares what becomes of
them with what the header's comments say; then determinism, resuming, leaving out and the explanations of ours.

Usage: self_test.py FOLDER  (for what is built)
"""
import json
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import config  # noqa: E402
import report  # noqa: E402
import sample  # noqa: E402
from source import Source  # noqa: E402
from operators import Finder  # noqa: E402

failures = []


def check(holds, what):
    if not holds:
        failures.append(what)
        print(f"FAILED: {what}")


def run(work, *options, config=os.path.join(HERE, "toy", "config.py")):
    done = subprocess.run([sys.executable, os.path.join(HERE, "mutate.py"), "--config", config, "--work", work,
                           "--jobs", "2", *options], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def expected():
    """{(line, operator): fates} from the comments of the toy."""
    fates, pending = {}, {}
    with open(os.path.join(HERE, "toy", "include", "toy.hpp")) as file:
        for number, line in enumerate(file, 1):
            comment = re.match(r" *// expect ([a-z ]+): (.+)", line)
            if comment:
                pending[comment.group(1)] = set(comment.group(2).split("|"))
                continue
            fates.update({(number, operator): values for operator, values in pending.items()})
            pending = {}
    return fates


def fates_of(work):
    with open(os.path.join(work, "state.json")) as file:
        state = json.load(file)
    fates = {}
    for verdict in state["verdicts"].values():
        fates.setdefault((verdict["line"], verdict["operator"]), set()).add(verdict["verdict"])
    for refused in state["refused_sites"]:
        fates.setdefault((refused["line"], refused["operator"]), set()).add("refused")
    return fates


def test_fates(work):
    code, output = run(work, "--seed", "1", "--at", "toy.hpp:1-999")
    check(code == 1, f"survivors make the exit code 1, not {code}:\n{output}")
    found, wanted = fates_of(work), expected()
    for site in sorted(found.keys() | wanted.keys()):
        check(found.get(site) == wanted.get(site),
              f"line {site[0]}, {site[1]}: {found.get(site)}, expected {wanted.get(site)}")
    check("not reached" in output and re.search(r"toy\.hpp:\d+ \[\d+\] comparison, in clamped: survived", output),
          "the report lists survivors")


def test_resume(work):
    state = os.path.join(work, "state.json")
    with open(state) as file:
        log = json.load(file)
    dropped = sorted(log["verdicts"], key=int)[:3]
    before = {n: log["verdicts"].pop(n)["verdict"] for n in dropped}
    with open(state, "w") as file:
        json.dump(log, file)
    _, output = run(work, "--seed", "1", "--at", "toy.hpp:1-999", "--resume")
    with open(state) as file:
        log = json.load(file)
    check("built" not in output, "a resumed run builds nothing again")
    check({n: log["verdicts"][n]["verdict"] for n in dropped} == before, "a resumed run tries what was left")


def test_seed(work):
    one, again, other = (run(work, "--seed", seed, "--sample", "8", "--list")[1] for seed in ("7", "7", "8"))
    check(one == again and one != other, "a seed gives one sample, another seed another")
    check(len({line.split(": ")[2] for line in one.splitlines()[1:]}) >= 3, "a sample mixes the operators")


def test_exclusion(work):
    config = os.path.join(work, "excluding.py")
    with open(os.path.join(HERE, "toy", "config.py")) as file:
        text = file.read().replace("os.path.dirname(os.path.abspath(__file__))", repr(os.path.join(HERE, "toy")))
    rule = '[dict(functions=["clamped"], operators=["comparison"], reason="left out")]'
    with open(config, "w") as file:
        file.write(text.replace("EXCLUDED = []", "EXCLUDED = " + rule))
    _, output = run(work, "--seed", "1", "--at", "toy.hpp:1-999", "--list", config=config)
    check("i <= 0" not in output and "i > size" not in output and "value <= end" in output,
          "a rule leaves out what it says and no more")


def test_explained():
    """Each rule of explained.py is about a fault that can be planted: a line that changed takes it along."""
    sites, _ = sample.find_sites(sample.read_headers(config.ROOT, config), config)
    check(len(sites) > 1000, f"the headers have places for faults: {len(sites)}")
    for rule in config.EXPLAINED:
        check(any(report.explains(rule, site) for site in sites), f"explained.py explains no fault by {rule}")


def test_reading():
    source = Source("""
        template <class T, int N = (1 < 2)> struct S : Base<T> { int x{3}; enum { a = 1 < 2 };
          S(int n) : x{n + 1}, y_(n) { Pair<T> pairs[7][8]; if (n <
              x) run(n, x); }
          bool operator<(const S& other) const { return std::less<int>{}(x, other.x) && f<T, 4>(x); } };
        """)
    check([f.name for f in source.functions] == ["S", "operator"], "functions are found, members are not")
    faults = [f for function in source.functions for f in Finder(source).faults(function)]
    kinds = {(f.operator, source.text[f.start:f.end]) for f in faults}
    check(("comparison", "<") in kinds and sum(f.operator == "comparison" for f in faults) == 1,
          "template brackets are no comparisons")
    check(("swapped arguments", "n, x") in kinds and ("deleted statement", "run(n, x);") in kinds, "calls are found")
    check(not any(f.operator == "off by one" and source.text[f.start:f.end] in "41278" for f in faults),
          "what the compiler must know is let be")


def main():
    work = os.path.abspath(sys.argv[1])
    os.makedirs(work, exist_ok=True)
    test_reading()
    test_explained()
    test_seed(work)
    test_exclusion(work)
    test_fates(work)
    test_resume(work)
    print(f"{len(failures)} checks failed" if failures else "all as expected")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
