"""Writes the instrumented copy of the headers, in which every drawn fault is a run-time choice."""
import os
import shutil


def weave(text, faults):
    """`text` with the faults {number: Fault} in it. Insertions nest and never add a line."""
    after, before = {}, {}
    for number, fault in faults.items():
        for start, end, prefix, suffix in fault.wraps:
            before.setdefault(start, []).append((-end, number, prefix))
            after.setdefault(end, []).append((-start, -number, suffix))
            assert "\n" not in prefix + suffix
    parts, last = [], 0
    for position in sorted(before.keys() | after.keys()):
        parts.append(text[last:position])
        # What ends here ends before anything begins: inner ones first, then outer ones first.
        for _, number, suffix in sorted(after.get(position, [])):
            parts.append(suffix.replace("@", str(-number)))
        for _, number, prefix in sorted(before.get(position, [])):
            parts.append(prefix.replace("@", str(number)))
        last = position
    parts.append(text[last:])
    return "".join(parts)


def write_headers(include, target, sources, sites):
    """A copy of the folder `include` at `target` with the sites {number: Site} planted."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(include, target)
    for header, source in sources.items():
        faults = {number: site.fault for number, site in sites.items() if site.header == header}
        if faults:
            with open(os.path.join(target, header), "w") as file:
                file.write(weave(source.text, faults))
