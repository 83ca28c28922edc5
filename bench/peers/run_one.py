"""Runs one library's peers on one case in this process: checks each, then times it. Prints JSON.

Called by cpu_peers.py, once per case and library, so that every measurement starts from fresh
memory and can be wrapped in a command of yours.
"""

import argparse
import importlib
import json
import sys
import time

import numpy as np

from cases import TOLERANCE, Case, make_problem, reference, rotation, small_case


def check(kind, case, problem, expected):
    """Largest error on the small case."""
    peer = kind(small_case(case))
    error = float(np.abs(peer.output(peer.run(peer.load(problem))) - expected).max())
    if not error <= TOLERANCE[case.dtype]:
        raise AssertionError(f"{kind.name}: error {error:.3g}, at most {TOLERANCE[case.dtype]}")
    return error


def measure(kind, case, problem, seconds, warm):
    """Milliseconds of each step, and its processor time, K/V sets taken in turn."""
    peer = kind(case)
    sets = [peer.load(problem)]
    for _ in range(1, 1 if warm else rotation(peer.set_bytes())):
        sets.append(peer.copy(sets[0]))
    for one in sets[:3]:
        peer.run(one)
    times, processor, start, i = [], [], time.perf_counter(), 0
    while len(times) < 5 or (time.perf_counter() - start < seconds and len(times) < 200):
        begin, processor_begin = time.perf_counter(), time.process_time()
        peer.run(sets[(i + 3) % len(sets)])
        times.append(1e3 * (time.perf_counter() - begin))
        processor.append(1e3 * (time.process_time() - processor_begin))
        i += 1
    return times, processor, len(sets)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library", help="torch_cpu, openvino_cpu, onnxruntime_cpu or llama_cpu")
    parser.add_argument("case", help="a Case as JSON")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per peer")
    parser.add_argument("--peers", default="", help="those whose name contains this")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--check-only", action="store_true")
    arguments = parser.parse_args()

    library = importlib.import_module(arguments.library)
    library.set_threads(arguments.threads)
    case = Case(**json.loads(arguments.case))
    small = make_problem(small_case(case), seed=1)
    expected = reference(small)
    problem = None if arguments.check_only else make_problem(case, seed=2)

    results = []
    for kind in library.PEERS:
        if not kind.supports(case) or arguments.peers not in kind.name:
            continue
        result = {"peer": kind.name, "library": library.version(), "shares": kind.shares}
        try:
            result["max_error"] = check(kind, case, small, expected)
            if not arguments.check_only:
                times, processor, sets = measure(kind, case, problem, arguments.seconds, arguments.warm)
                result |= {"ms": float(np.median(times)), "ms_min": min(times)}
                result |= {"processor_ms": float(np.median(processor))}
                result |= {"repeats": len(times), "sets": sets}
        except (RuntimeError, AssertionError, MemoryError) as error:
            result["failed"] = str(error).strip().splitlines()[0]
        results.append(result)
    json.dump(results, sys.stdout)
    print()


if __name__ == "__main__":
    main()
