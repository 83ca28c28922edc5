"""Headless Chromium, spoken to through a pipe: Python's library is enough. And a server for it."""
import base64
import json
import os
import subprocess
import threading
import time

LIMIT = 120  # seconds


class Browser:
    """DevTools' protocol: messages of JSON, each with a zero byte after it."""

    def __init__(self, program, folder):
        to_read, self.to = os.pipe()
        self.from_, from_write = os.pipe()

        def wire():  # Chromium reads from 3 and writes to 4
            os.dup2(to_read, 63)
            os.dup2(from_write, 64)
            os.dup2(63, 3)
            os.dup2(64, 4)
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
             "--disable-dev-shm-usage", f"--user-data-dir={folder}", "--hide-scrollbars", "about:blank"],
            close_fds=False, preexec_fn=wire, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(from_write)
        self.rest, self.number, self.session, self.errors = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                got = os.read(self.from_, 1 << 16)
                assert got, "Chromium has ended"
                self.rest += got
            text, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(text)
            entry = answer.get("params", {}).get("entry", {})
            if answer.get("method") == "Runtime.exceptionThrown" or entry.get("level") == "error":
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def ask(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression):
        limit = time.monotonic() + LIMIT
        while not self.ask(expression):
            assert time.monotonic() < limit, f"waited in vain for {expression}; {self.errors}"
            time.sleep(0.1)

    def open(self, url, width=1360, height=760, dark=False, still=False, page=None):
        """With page, this text instead of the server's own page, from the server's address."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}])
        self.call("Page.navigate", url=url + "/health" if page else url)
        if page:
            self.wait_for("location.pathname === '/health' && document.readyState === 'complete'")
            self.ask(f"document.open(); document.write({json.dumps(page)}); document.close(); true")
        self.wait_for("typeof poll === 'function' && document.readyState === 'complete'")

    def press(self, key):
        code = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowDown": 40}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, file):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        with open(file, "wb") as out:
            out.write(base64.b64decode(data))

    def end(self):
        self.process.kill()
        self.process.wait()


def start(serve, model, *options):
    process = subprocess.Popen([serve, "run", *model, *(() if "--port" in options else ("--port", "0")),
                                "--quiet", *options],
                               stdout=subprocess.PIPE, text=True)
    url = ""
    for line in process.stdout:
        if "http://" in line and not url:
            url = line.split(" at ")[1].split()[0]
        if line.startswith("stop"):
            break
    threading.Thread(target=process.stdout.read, daemon=True).start()
    return process, url
