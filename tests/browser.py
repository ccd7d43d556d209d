"""A headless browser, driven by the DevTools protocol over pipes: no package is needed, only a Chromium."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    """One page of a headless Chromium, with a profile in `folder`."""

    def __init__(self, url: str, folder: Path) -> None:
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
        self._buffer, self._number, self._session = b"", 0, {}
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "DOM", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result; errors of the page are kept in `errors`."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while (message := self._receive()).get("id") != self._number:
            entry = message.get("params", {}).get("entry", {})
            if message.get("method") == "Runtime.exceptionThrown" or entry.get("level") == "error":
                self.errors.append(json.dumps(message["params"]))
        assert "error" not in message, message
        return message["result"]

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
