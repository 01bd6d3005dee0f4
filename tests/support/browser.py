"""A headless Chromium that is told what to open, and asked what it shows, over its DevTools protocol."""

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SOON_S = 60.0
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
    "--proxy-server=127.0.0.1:1", "--proxy-bypass-list=127.0.0.1", "about:blank",
)  # fmt: skip
"""All but loopback goes to a proxy that nobody is."""

_MIDDLE = """(() => {
    const found = document.querySelector(%s);
    found.scrollIntoView({block: "center"});
    const box = found.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
})()"""


@dataclass
class Tab:
    """A page of the browser; asked: addresses that it wanted; errors: what its console said."""

    socket: WebSocketClientConnection
    asked: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; what happens meanwhile is noted."""
        number = next(self._numbers)
        await self.socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = await asyncio.wait_for(self.socket.read_message(), SOON_S)
            assert message is not None, "the browser has ended"
            found = json.loads(message)
            if found.get("id") == number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self._note(found)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.asked.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                self.errors.append(json.dumps(parameters["entry"]))
            case "Runtime.consoleAPICalled":
                self.errors.append(json.dumps(parameters["args"]))

    async def open(self, address: str, *, width: int = 1200, height: int = 900) -> None:
        """Open an address in a window of a size, and wait until it is there."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self.call("Page.navigate", url=address)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript is."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        end_s = time.monotonic() + SOON_S
        while not await self.value(expression):
            assert time.monotonic() < end_s, f"never: {expression}; {self.errors}"
            await asyncio.sleep(0.1)

    async def point_at(self, selector: str) -> None:
        """Move the mouse to the middle of the first element of a selector."""
        x, y = await self.value(_MIDDLE % json.dumps(selector))
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def picture(self) -> bytes:
        """Return the whole page as a PNG, in base64."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return str(found["data"]).encode()


@contextlib.asynccontextmanager
async def browser_tab() -> AsyncIterator[Tab]:
    """Start a browser with nothing in it, and end it."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [CHROMIUM, f"--user-data-dir={profile}", *OPTIONS],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        socket = None
        try:
            socket = await _connected(Path(profile) / "DevToolsActivePort")
            yield Tab(socket)
        finally:
            if socket is not None:
                socket.close()
                while await socket.read_message() is not None:
                    pass
                await asyncio.sleep(0.1)  # until it is closed here too
            process.terminate()
            process.wait(SOON_S)


async def _connected(port_file: Path) -> WebSocketClientConnection:
    end_s = time.monotonic() + SOON_S
    while not port_file.exists() or "\n" not in port_file.read_text():
        assert time.monotonic() < end_s, "the browser does not start"
        await asyncio.sleep(0.05)
    port = port_file.read_text().splitlines()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        pages = [page for page in json.load(answer) if page["type"] == "page"]
    return await websocket_connect(pages[0]["webSocketDebuggerUrl"], max_message_size=2**28)
