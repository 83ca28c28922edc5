"""What came of it, for people."""
import collections
import fnmatch

from operators import OPERATORS

VERDICTS = ("killed", "timed out", "survived", "not reached")
DEAD = ("killed", "timed out")


def counts(sites, verdicts, config):
    """How many faults died, survived with an explanation, survived."""
    died = sum(v["verdict"] in DEAD for v in verdicts.values())
    explained = sum(v["verdict"] not in DEAD and explanation(sites[n], config) is not None
                    for n, v in verdicts.items())
    return died, explained, len(verdicts) - died - explained


def rate(sites, verdicts, config):
    """The part that died of the faults that can be distinguished from the original."""
    died, _, survived = counts(sites, verdicts, config)
    return died / max(1, died + survived)


def explanation(site, config):
    """Why the configuration says that a survivor cannot be distinguished from the original, or None."""
    return next((rule["reason"] for rule in config.EXPLAINED if explains(rule, site)), None)


def explains(rule, site):
    return (fnmatch.fnmatch(site.header, rule["header"]) and rule["original"] in site.original
            and rule.get("becomes", "") in site.mutated)


def text(sites, verdicts, refused, excluded, left_out, config, seed, seconds):
    """The report. `refused`: sites that the compiler refused."""
    lines = [f"seed {seed}: {len(verdicts)} faults", ""]
    lines += _table("operator", OPERATORS, lambda s: s.fault.operator, sites, verdicts, refused)
    headers = sorted({s.header for s in [*sites.values(), *refused]})
    lines += _table("header", headers, lambda s: s.header, sites, verdicts, refused)

    survivors = [(n, s) for n, s in sorted(sites.items(), key=lambda i: (i[1].header, i[1].line))
                 if n in verdicts and verdicts[n]["verdict"] not in DEAD]
    explained = [(n, s) for n, s in survivors if explanation(s, config)]
    for title, group in (("explained survivors", explained),
                         ("survivors", [pair for pair in survivors if pair not in explained])):
        if group:
            lines += [f"{title}: {len(group)}"]
        for number, site in group:
            lines += [f"  {config.INCLUDE}/{site.header}:{site.line} [{number}] {site.fault.operator}, "
                      f"in {site.function}: {verdicts[number]['verdict']}",
                      f"      {site.original}", f"   -> {site.mutated}"]
            if explanation(site, config):
                lines += [f"      {explanation(site, config)}"]
        if group:
            lines += [""]

    killers = collections.Counter(v["by"] for v in verdicts.values() if v["by"])
    lines += ["noticed by: " + ", ".join(f"{name} {count}" for name, count in killers.most_common()), ""]
    if excluded or left_out:
        lines += ["left out by the configuration"]
        lines += [f"  {count:5} sites: {reason}" for reason, count in sorted(excluded.items())]
        lines += [f"  {name}: {reason}" for name, reason in sorted(left_out.items())]
        lines += [""]
    died, like, survived = counts(sites, verdicts, config)
    lines += [f"{died} of {len(verdicts)} faults died: {100 * died / max(1, len(verdicts)):.1f} %",
              f"{100 * rate(sites, verdicts, config):.1f} % of the {died + survived} that are not explained "
              f"({like} are; {survived} survived); {seconds / 60:.0f} min, seed {seed}"]
    return "\n".join(lines)


def _table(title, rows, key, sites, verdicts, refused):
    width = max([len(title), 5, *(len(row) for row in rows)])
    lines = [f"{title:{width}}  " + "  ".join(f"{v:>11}" for v in (*VERDICTS, "not compiled", "died"))]
    for row in (*rows, "total"):
        mine = [verdicts[n]["verdict"] for n, s in sites.items() if n in verdicts and row in (key(s), "total")]
        counts = [mine.count(v) for v in VERDICTS] + [sum(row in (key(s), "total") for s in refused)]
        if not mine and not counts[-1]:
            continue
        share = f"{100 * sum(m in DEAD for m in mine) / len(mine):.1f} %" if mine else ""
        lines.append(f"{row:{width}}  " + "  ".join(f"{c:>11}" for c in counts[:-1]) + f"  {counts[-1]:>12}{share:>13}")
    return lines + [""]
