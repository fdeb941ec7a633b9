"""Headless Chromium over its debugging pipe: opens a page, reads values, moves the mouse. No network, no driver.

The DevTools protocol is JSON, one message up to each zero byte, on file descriptors 3 (to the browser) and 4 (from it).
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

TIMEOUT = 240.0
AXE = "axe-core@4.14.1"


def axe():
    """The source of axe-core, which finds what people with a disability cannot use; npm gets it, once. Skips where there is no npm."""
    cache = Path(os.environ.get("SMPC_TEST_CACHE") or Path.home() / ".cache" / "smpc-tests") / AXE
    source = cache / "node_modules" / "axe-core" / "axe.min.js"
    if not source.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed (Debian: apt-get install npm)")
        cache.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--silent", "--no-save", "--prefix", str(cache), AXE]
        made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if made.returncode:
            pytest.skip(f"npm cannot install {AXE}: {made.stderr[-300:]}")
    return source.read_text(encoding="utf-8")


@contextlib.contextmanager
def browser(tmp_path):
    """A browser, or a skipped test where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    to_browser, from_browser = os.pipe(), os.pipe()
    # Numbers from 10 on, so that 3 and 4 can be set without overwriting one that is still needed.
    child = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_browser[0], from_browser[1])]
    os.close(to_browser[0])
    os.close(from_browser[1])
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-dev-shm-usage",
        "--remote-debugging-pipe",
        f"--user-data-dir={tmp_path / 'chromium'}",
        "about:blank",
    ]
    script = f'exec "$@" 3<&{child[0]} 4>&{child[1]}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *command],
        pass_fds=child,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for fd in child:
        os.close(fd)
    try:
        yield Browser(to_browser[1], from_browser[0])
    finally:
        process.kill()
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])


class Browser:
    """One tab. `errors` has what the console complained of, `requests` every URL that was asked for."""

    def __init__(self, writer, reader):
        self.writer, self.reader = writer, reader
        self.buffer = b""
        self.number = 0
        self.errors, self.requests, self.dialogs, self.loaded = [], [], [], 0
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path, scheme="light", width=1280, height=1000):
        self.errors, self.requests, self.dialogs = [], [], []
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        before = self.loaded
        self.call("Page.navigate", url=path.as_uri())
        while self.loaded == before:
            self.handle(self.read())
        self.settle()

    def settle(self):
        """Wait until what was asked for has been drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.writer, data) :]
        wanted = self.number
        while True:
            answer = self.read()
            if answer.get("id") == wanted:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self.handle(answer)

    def read(self):
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reader], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"chromium did not answer within {TIMEOUT:.0f} s"
            data = os.read(self.reader, 1 << 16)
            assert data, "chromium ended"
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def handle(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded += 1
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        elif method == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])
