"""Which faults there are in the configured headers, which are left out and why, and a seeded sample."""
import collections
import dataclasses
import fnmatch
import glob
import os
import random
import re

from operators import OPERATORS, Finder, Fault
from source import Source


@dataclasses.dataclass(frozen=True)
class Site:
    """A fault and its location."""

    header: str  # below the include folder
    line: int
    last_line: int
    function: str
    fault: Fault
    original: str  # its lines before and after
    mutated: str


def read_headers(root, config, only=None):
    """{header: Source} of the configured globs, or of those in `only`."""
    base = os.path.join(root, config.INCLUDE)
    names = {os.path.relpath(path, base)
             for pattern in (only or config.HEADERS)
             for path in glob.glob(os.path.join(base, pattern), recursive=True)}
    sources = {}
    for name in sorted(names):
        with open(os.path.join(base, name)) as file:
            sources[name] = Source(file.read())
    return sources


def find_sites(sources, config):
    """All sites, and how many each exclusion of the configuration took: ([Site], {reason: count})."""
    sites, excluded = [], collections.Counter()
    for header, source in sources.items():
        finder = Finder(source)
        for function in source.functions:
            calls = source.calls(function)
            for fault in finder.faults(function):
                site = _site(header, source, function, fault)
                reason = next((rule["reason"] for rule in config.EXCLUDED
                               if _excludes(rule, site, source, calls)), None)
                if reason is None:
                    sites.append(site)
                else:
                    excluded[reason] += 1
    sites.sort(key=lambda s: (s.header, s.fault.start, s.fault.end, s.fault.operator, s.fault.replacement))
    return sites, excluded


def _site(header, source, function, fault):
    first, last = source.line(fault.start), source.line(fault.end - 1)
    original = source.line_text(first, last)
    begin = source.lines[first - 1]
    end = source.lines[last] - 1 if last < len(source.lines) else len(source.text)
    mutated = Source.plain(source.text[begin:fault.start] + fault.replacement + source.text[fault.end:end])
    return Site(header, first, last, function.name, fault, original, mutated)


def _excludes(rule, site, source, calls):
    """Every key of a rule must agree; config.py says what they mean."""
    if not any(fnmatch.fnmatch(site.header, pattern) for pattern in rule.get("headers", ["*"])):
        return False
    if "functions" in rule and site.function not in rule["functions"]:
        return False
    if "operators" in rule and site.fault.operator not in rule["operators"]:
        return False
    if "text" in rule and not re.search(rule["text"], site.original):
        return False
    changed = source.text[site.fault.start:site.fault.end]
    if "changes" in rule and not re.fullmatch(rule["changes"], changed, re.DOTALL):
        return False
    return "calls" not in rule or any(call.name in rule["calls"] and _within(site.fault, call, rule, source)
                                      for call in calls)


def _within(fault, call, rule, source):
    """Within the call's arguments that the rule means, or, if it means all, the call as a statement."""
    start = lambda i: source.tokens[i].start  # noqa: E731
    if "from_argument" not in rule and "to_argument" not in rule:
        named = re.fullmatch(r"[\w:.>-]*", source.text[fault.start:start(call.open)])
        if named and source.word(call.close + 1) == ";" and source.tokens[call.close + 1].end == fault.end:
            return True
    arguments = call.arguments[rule.get("from_argument", 0):rule.get("to_argument", len(call.arguments)) + 1]
    return bool(arguments) and start(arguments[0][0]) <= fault.start and (
        fault.end <= source.tokens[arguments[-1][1]].end)


def draw(sites, seed, count):
    """`count` sites, the operators in turn, so that the many off-by-ones do not drown the rest."""
    generator = random.Random(seed)
    piles = []
    for operator in OPERATORS:
        pile = [site for site in sites if site.fault.operator == operator]
        generator.shuffle(pile)
        piles.append(pile)
    drawn = []
    while len(drawn) < count and any(piles):
        for pile in piles:
            if pile and len(drawn) < count:
                drawn.append(pile.pop())
    return drawn
