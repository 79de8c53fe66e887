"""Chromium without a window, driven by the DevTools protocol (chromedevtools.github.io/devtools-protocol)."""

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
START_S, WAIT_S = 60.0, 30.0


def program() -> str | None:
    """Path of the browser, if this machine has one."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Page:
    """A tab. `errors`: what its scripts reported as errors or warnings, and loads that failed."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(WAIT_S))
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        values = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = values["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if values["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(each.get("value")) for each in values["args"]))
            case "Log.entryAdded" if values["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def reload(self) -> None:
        """Load it again. A script that runs meanwhile would be refused."""
        self.call("Page.reload")
        message: dict[str, Any] = {}
        while message.get("method") != "Page.loadEventFired":
            message = json.loads(self._socket.recv(WAIT_S))
            self._note(message)

    def run(self, script: str) -> Any:
        """Value of an expression, of what it promises too."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, within_s: float = WAIT_S) -> Any:
        """First true value of an expression. Fails with the page's text."""
        deadline = time.monotonic() + within_s
        while not (value := self.run(condition)):
            assert time.monotonic() < deadline, f"never: {condition}\n{self.text()}\n{self.errors}"
            time.sleep(0.1)
        return value

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)["data"]
        file.write_bytes(base64.b64decode(data))


class Browser:
    def __init__(self, url: str) -> None:
        """`url`: of the DevTools endpoint."""
        self._url = url

    @contextmanager
    def page(self) -> Iterator[Page]:
        """A new tab, with a session storage of its own."""
        target = httpx.put(f"{self._url}/json/new?about:blank", timeout=WAIT_S).json()
        with connect(target["webSocketDebuggerUrl"], max_size=None, ping_interval=None) as socket:
            yield Page(socket)
        httpx.get(f"{self._url}/json/close/{target['id']}", timeout=WAIT_S)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile in this new directory, ended behind the context."""
    found = program()
    assert found is not None, "no Chromium: apt-get install chromium"
    process = subprocess.Popen(
        [found, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield Browser(_endpoint(profile / "DevToolsActivePort", process))
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def _endpoint(file: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + START_S
    while not (file.exists() and file.read_text()):
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        assert time.monotonic() < deadline, "the browser does not start"
        time.sleep(0.05)
    return f"http://127.0.0.1:{file.read_text().split()[0]}"
