"""The test programs: which there are, what of the headers they compile, and building them."""
import concurrent.futures
import dataclasses
import fnmatch
import glob
import os
import platform
import re
import subprocess
import sys

from operators import OPERATORS

HERE = os.path.dirname(os.path.abspath(__file__))
LOCATION = re.compile(r"([^\s:]+):(\d+):\d+")
# A fault's number in a message, as an argument of one of switch.hpp's templates.
NAMED = re.compile(r"\b(?:on|off|shift|as|(?:Less|LessEqual|Greater|GreaterEqual|Equal|NotEqual)(?:Of)?)<(\d+)")


class Failed(Exception):
    """What keeps the tool from going on, as text for people."""


@dataclasses.dataclass(frozen=True)
class Program:
    name: str
    source: str
    flags: tuple
    variables: tuple = ()  # of its environment, (name, value)


class Builder:
    def __init__(self, root, work, config, cxx, jobs):
        self.root, self.work, self.config, self.cxx, self.jobs = root, work, config, cxx, jobs
        self.include = os.path.join(work, "include")
        for folder in ("bin", "include", "tmp"):
            os.makedirs(os.path.join(work, folder), exist_ok=True)

    def programs(self, only=None, fast=False):
        """One per configured test and variant, as tests/CMakeLists.txt has them, or those of the fast run."""
        found = self._fast() if fast else self._all()
        return [p for p in found if not only or any(fnmatch.fnmatch(p.name, pattern) for pattern in only)]

    def _sources(self):
        """{test: its file} of those that are not left out."""
        paths = sorted(p for pattern in self.config.TESTS for p in glob.glob(os.path.join(self.root, pattern)))
        named = ((os.path.splitext(os.path.basename(path))[0], path) for path in paths)
        return {name: path for name, path in named
                if not any(fnmatch.fnmatch(name, pattern) for pattern in self.config.LEFT_OUT_TESTS)}

    def _all(self):
        found, variants = [], self._declared_variants()
        for name, path in self._sources().items():
            found.append(Program(name, path, tuple(self.config.NATIVE)))
            for variant in variants.get(name, []):
                flags = self.config.VARIANTS.get(variant)
                if flags and _runs_here(variant):
                    found.append(Program(f"{name}_{variant}", path, tuple(flags)))
        return found

    def _fast(self):
        """Of the lines `chunkattn_fast_program(NAME [VARIANT V] ... [SCALE N] TESTS TEST...)`."""
        with open(os.path.join(self.root, self.config.FAST)) as file:
            declared = re.findall(r"^chunkattn_fast_program\(\w+\s([^)]*)\)", file.read(), re.MULTILINE)
        found, sources = [], self._sources()
        for words in map(str.split, declared):
            tests = words.index("TESTS")
            given = dict(zip(words[:tests], words[1:tests]))
            variant, scale = given.get("VARIANT"), given.get("SCALE")
            if variant and not _runs_here(variant):
                continue
            flags = self.config.VARIANTS[variant] if variant else self.config.FAST_NATIVE
            for test in (t for t in words[tests + 1:] if t in sources):
                found.append(Program(f"{test}_{variant}" if variant else test, sources[test], tuple(flags),
                                     (("CHUNKATTN_TEST_SCALE", scale),) if scale else ()))
        return found

    def _declared_variants(self):
        """{test: variants} of the lines `chunkattn_test(FOLDER/TEST ... VARIANTS VARIANT...)`."""
        if not self.config.DECLARED:
            return {}
        with open(os.path.join(self.root, self.config.DECLARED)) as file:
            return {test: variants.split() for test, variants in re.findall(
                r"^chunkattn_test\(\w+/(\w+)\b[^)]*?\sVARIANTS((?:\s+[a-z0-9]+)+)", file.read(), re.MULTILINE)}

    def binary(self, program):
        return os.path.join(self.work, "bin", program.name)

    def _command(self, program, include):
        folders = [include] + [os.path.join(self.root, folder) for folder in self.config.FOLDERS]
        return [self.cxx, *self.config.FLAGS, *program.flags, *(f"-I{folder}" for folder in folders),
                *(flag.replace("@ROOT@", self.root).replace("@WORK@", self.work) for flag in self.config.DEFINES)]

    def _run(self, command):
        return subprocess.run(command, cwd=self.root, env={**os.environ, "LC_ALL": "C"}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    # ---- what is compiled on this machine ------------------------------------------------------

    def compiled_lines(self, programs):
        """{program name: {header: lines that pass the preprocessor}}"""
        include = os.path.join(self.root, self.config.INCLUDE)

        def preprocessed(program):
            done = self._run([*self._command(program, include), "-E", program.source])
            if done.returncode != 0:
                raise Failed(f"{program.name} cannot be preprocessed:\n{done.stderr}")
            lines, header, number = {}, None, 0
            for line in done.stdout.splitlines():
                marker = re.match(r'# (\d+) "([^"]*)"', line)
                if marker:
                    number = int(marker.group(1))
                    inside = os.path.relpath(os.path.join(self.root, marker.group(2)), include)
                    header = None if inside.startswith("..") else inside
                    continue
                if header and line.strip():
                    lines.setdefault(header, set()).add(number)
                number += 1
            return lines

        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            return dict(zip((p.name for p in programs), pool.map(preprocessed, programs)))

    # ---- building ------------------------------------------------------------------------------

    def build(self, programs, scouts, sites, refused, write, progress):
        """Builds the programs, rewriting the headers without the faults that the compiler refuses and
        adding these to `refused`. `write(sites)` writes the instrumented headers. The scouts are only
        checked, before and one by one, so that few of the long builds fail."""
        main = self._build_main()

        def attempt(lot, build):
            """Those of a lot that failed; what they say is refused."""
            live = {number: site for number, site in sites.items() if number not in refused}
            write(live)
            failed = []
            with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
                for program, done in pool.map(lambda p: (p, build(p)), lot):
                    if done.returncode != 0:
                        failed.append(program)
                        guilty = self._guilty(done.stderr, live)
                        if not guilty:
                            raise Failed(f"{program.name} does not compile, no fault in sight:\n{done.stderr[-4000:]}")
                        refused.update(guilty)
                    progress(program.name, build != self._check and done.returncode == 0)
            return failed

        for scout in scouts:
            while attempt([scout], self._check):
                pass
        todo = list(programs)
        while todo:
            todo = attempt(todo, lambda p: self._build_one(p, main))

    def scouts(self, programs, compiled, sites):
        """Few programs that compile the lines of all sites between them."""
        left = {(site.header, site.line) for site in sites.values()}
        chosen = []
        while left:
            covers = {p: {(h, l) for h, l in left if l in compiled[p.name].get(h, ())} for p in programs}
            best = max(programs, key=lambda p: len(covers[p]))
            if not covers[best]:
                break
            chosen.append(best)
            left -= covers[best]
        return chosen

    def _build_main(self):
        if not self.config.MAIN:
            return []
        main = os.path.join(self.work, "bin", "main.o")
        program = Program("main", os.path.join(self.root, self.config.MAIN), tuple(self.config.NATIVE))
        done = self._run([*self._command(program, os.path.join(self.root, self.config.INCLUDE)),
                          "-c", program.source, "-o", main])
        if done.returncode != 0:
            raise Failed(f"{self.config.MAIN} does not compile:\n{done.stderr}")
        return [main]

    def _instrumented(self, program):
        return [*self._command(program, self.include), "-include", os.path.join(HERE, "switch.hpp"), program.source]

    def _check(self, program):
        return self._run([*self._instrumented(program), "-fsyntax-only"])

    def _build_one(self, program, main):
        return self._run([*self._instrumented(program), *main, "-o", self.binary(program)])

    def _guilty(self, errors, sites):
        """The faults that a compiler's messages speak of: by number where it names one, else those
        on the line of the error, else on the lines that led to it, nearest first."""
        guilty = set()
        places = {}
        for number, site in sites.items():
            for line in range(site.line, site.last_line + 1):
                places.setdefault((site.header, line), set()).add(number)
        for block in _messages(errors):
            named = {int(n) for line in block for n in NAMED.findall(line)}
            named &= sites.keys()
            if named:
                guilty |= named
                continue
            for path, line in _locations(block):
                header = os.path.relpath(os.path.join(self.root, path), self.include)
                near = places.get((header, line), set())
                if near:  # others of that line may be innocent: the next round shows it
                    likely = [{n for n in near if sites[n].fault.operator == o} for o in reversed(OPERATORS)]
                    guilty |= next(group for group in likely if group)
                    break
        return guilty


def _runs_here(variant):
    return variant != "avx2" or platform.machine() in ("x86_64", "AMD64")


def _messages(errors):
    """Lines of each error: what led to it stands before its line, notes after."""
    blocks, context = [], []
    for line in errors.splitlines():
        if re.search(r": (fatal )?error: ", line):
            blocks.append([line, *context])
            context = []
        elif re.search(r"(In instantiation of|In function|In member function|inlined from|required from|In lambda)", line):
            context.append(line)
        elif re.search(r"In file included from", line):
            context = []
        elif blocks and re.search(r": note: ", line):
            blocks[-1].append(line)
    return blocks


def _locations(block):
    for line in block:
        match = LOCATION.search(line)
        if match:
            yield match.group(1), int(match.group(2))


def version(cxx):
    try:
        return subprocess.run([cxx, "--version"], text=True, stdout=subprocess.PIPE).stdout.splitlines()[0]
    except (OSError, IndexError):
        print(f"SKIPPED: no compiler {cxx}")
        sys.exit(77)
