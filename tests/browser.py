"""A headless Chromium, driven over its DevTools pipe: no port, no driver program, no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--hide-scrollbars", "--font-render-hinting=none", "--lang=en", "--mute-audio"),
)
PATIENCE = 90.0
"""Seconds: the machine may have much else to do."""


class Browser:
    """One page.

    Attributes:
        requests: Addresses of everything that the page asked for.
        complaints: Errors and warnings of the console, broken policies included.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """One command; returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _read(self) -> Any:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            assert ready, "Chromium does not answer"
            read = os.read(self._answers, 1 << 20)
            assert read, "Chromium has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Waits until an expression is true; returns its value."""
        end = time.monotonic() + PATIENCE
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.1)
        return found

    def size(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """The window, and the colours that the user prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def press(self, key: str, code: int) -> None:
        """One key, as a keyboard sends it."""
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, file: Path) -> None:
        """The whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Starts Chromium with a fresh profile, ends it and whatever it started."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    child = subprocess.Popen(
        ["bash", "-c", command, CHROMIUM, *OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        browser = Browser(ours_out, ours_in)
        yield browser
        browser._session = None
        browser.call("Browser.close")
        child.wait(20)
    finally:
        child.kill()  # nothing where it has ended by itself; its own children go with it
        child.wait()
        os.close(ours_out)
        os.close(ours_in)
