"""Running the built programs: once without a fault, to see what each reaches, then once per fault."""
import concurrent.futures
import fnmatch
import os
import signal
import subprocess
import time

from programs import Failed

# Limits are set by the shell: a child forked from a thread should do nothing but exec.
LIMITED = ["sh", "-c", 'ulimit -c 0; ulimit -v "$1"; shift; exec "$@"', "sh"]


class Runner:
    def __init__(self, builder, config, factor):
        self.builder, self.config, self.factor = builder, config, factor
        self.seconds = {}  # of each program without a fault
        self.reached = {}  # program: numbers

    def _start(self, program, variables, limit):
        """(exit code or None when out of time, seconds, output)."""
        environment = {**os.environ, **self.config.ENVIRONMENT, **dict(program.variables), **variables,
                       "TMPDIR": os.path.join(self.builder.work, "tmp")}
        command = [*LIMITED, str(self.config.MEMORY_KB), self.builder.binary(program), *self.config.ARGUMENTS]
        begin = time.monotonic()
        with subprocess.Popen(command, cwd=self.builder.root, env=environment, start_new_session=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                output, _ = process.communicate(timeout=limit)
                code = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                code = None
        return code, time.monotonic() - begin, output.decode(errors="replace")

    def survey(self, program):
        """Runs a program without a fault and notes which it reaches. It has to pass."""
        record = os.path.join(self.builder.work, "bin", program.name + ".reached")
        code, seconds, output = self._start(program, {"CHUNKATTN_MUTANT_REACHED": record}, self.config.SURVEY_SECONDS)
        if code != 0:
            raise Failed(f"{program.name} fails without any fault (exit {code}):\n{output[-2000:]}")
        with open(record) as file:
            self.reached[program.name] = {int(line) for line in file}
        self.seconds[program.name] = seconds

    def order(self, site, number, programs):
        """Programs that reach the fault: those configured for its header first, each lot by time."""
        first = next((names for pattern, names in self.config.FIRST if fnmatch.fnmatch(site.header, pattern)), [])
        reaching = [p for p in programs if number in self.reached[p.name]]
        if not reaching:  # perhaps in a process that a test forks, which notes nothing
            reaching = [p for p in programs if p.name in first]
        return sorted(reaching, key=lambda p: (p.name not in first, self.seconds[p.name], p.name))

    def run(self, site, number, programs):
        """{"verdict", "by", "seconds"}: stops at the first program that notices."""
        begin = time.monotonic()
        order = self.order(site, number, programs)
        reached = any(number in self.reached[p.name] for p in programs)
        verdict, by = ("survived" if reached else "not reached"), None
        for program in order:
            limit = self.factor * self.seconds[program.name] + self.config.SLACK_SECONDS
            code, _, _ = self._start(program, {"CHUNKATTN_MUTANT": str(number)}, limit)
            if code != 0:
                verdict, by = ("timed out" if code is None else "killed"), program.name
                break
        return {"verdict": verdict, "by": by, "seconds": round(time.monotonic() - begin, 2)}

    def run_all(self, sites, programs, jobs, done):
        """Runs the sites {number: Site}, `jobs` at a time; done(number, verdict) as they come."""
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            waiting = {pool.submit(self.run, site, number, programs): number for number, site in sites.items()}
            try:
                for future in concurrent.futures.as_completed(waiting):
                    done(waiting[future], future.result())
            finally:
                pool.shutdown(cancel_futures=True)
