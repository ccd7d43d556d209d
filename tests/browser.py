"""A headless browser, driven by the DevTools protocol over pipes: no package is needed, only a Chromium."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Chromium:
    """A headless Chromium with its files in `folder`. It starts in seconds, so tests share the fixture `chromium`."""

    def __init__(self, folder: Path) -> None:
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]

        def as_3_and_4() -> None:  # where Chromium expects them; they may be each other's numbers now
            high = os.dup2(commands, 103), os.dup2(answers, 104)
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "close_fds": False}
        self._process = subprocess.Popen([str(CHROMIUM), *options], preexec_fn=as_3_and_4, **pipes)
        os.close(commands)
        os.close(answers)
        self._buffer, self._number = b"", 0

    @contextlib.contextmanager
    def page(self, url: str) -> Iterator["Page"]:
        """Open a page with a profile of its own, and close it at the end."""
        profile = self.call({}, [], "Target.createBrowserContext")
        target = self.call({}, [], "Target.createTarget", url="about:blank", **profile)
        session = self.call({}, [], "Target.attachToTarget", flatten=True, **target)
        try:
            yield Page(self, session, url)
        finally:
            self.call({}, [], "Target.disposeBrowserContext", **profile)

    def call(self, session: dict[str, str], errors: list[str], method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result; append errors of the session's page to `errors`."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while (message := self._receive()).get("id") != self._number:
            if message.get("sessionId") != session.get("sessionId"):
                continue
            entry = message.get("params", {}).get("entry", {})
            if message.get("method") == "Runtime.exceptionThrown" or entry.get("level") == "error":
                errors.append(json.dumps(message["params"]))
        assert "error" not in message, message
        return message["result"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            block = os.read(self._read, 1 << 16)
            assert block, "the browser has ended"
            self._buffer += block
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


class Page:
    """An open page; `errors` has the exceptions and errors that it has logged."""

    def __init__(self, chromium: Chromium, session: dict[str, str], url: str) -> None:
        self._chromium, self._session = chromium, session
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "DOM", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol on this page and return its result."""
        return self._chromium.call(self._session, self.errors, method, **params)

    def value(self, script: str) -> Any:
        """Return the JSON value of an expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        """Return the value of an expression as soon as it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.value(script)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{script} is not true; the page: {self.value('document.body.innerText')!r}")
            time.sleep(0.05)
        return value

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])
