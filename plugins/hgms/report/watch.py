"""``hgms report --watch``: a page of current runs, served to browsers on this machine.

The page is rebuilt when the runs change. The server provides one page, at ``/``, on the loopback
address. It rejects everything else: other paths, methods that change data, and requests with
another host name. Without the last check, a foreign page with a name that resolves to this machine
could read the report. The page requests the tag of the newest page every few seconds, and reloads
if the tag has changed.
"""

from __future__ import annotations

import contextlib
import html as escaping
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from attrs import define, field

from hgms.report.page import html
from hgms.report.study import Study
from hgms.store import digest
from hgms_core import ConfigError, HgmsError

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")
"""Host names of this server for a browser on this machine."""


@define
class Pages:
    """The newest page of the runs below ``folders``, rebuilt after a change.

    ``build`` creates the study. The time between two pages is at least ``interval`` seconds, and at
    least ``rest`` times the duration of the last build.
    """

    folders: Sequence[Path]
    build: Callable[[], Study]
    interval: float = 2.0
    rest: float = 10.0
    _page: bytes = b""
    _seen: object = None
    _next: float = 0.0
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def newest(self) -> bytes:
        """Return the page, or a page with a reason if no report is possible.

        The reason is that there is no finished run, or that the folders are not readable.
        """
        with self._lock:
            began = time.monotonic()
            seen = self.state() if began >= self._next else self._seen
            if seen != self._seen or not self._page:
                try:
                    self._page = html(self.build(), watch=True).encode(errors="backslashreplace")
                    self._seen = seen
                except (HgmsError, OSError) as error:
                    self._page = waiting(str(error)).encode(errors="backslashreplace")
                    self._seen = None
            if began >= self._next:
                self._next = time.monotonic() + max(
                    self.interval, self.rest * (time.monotonic() - began)
                )
            return self._page

    def state(self) -> object:
        """Return values that change when a run starts or ends.

        The values are small files with their sizes and times.
        """
        known = []
        for folder in self.folders:
            for directory, below, files in os.walk(folder):
                below[:] = [name for name in below if not name.startswith(".")]
                for name in {
                    "config.toml",
                    "summary.json",
                    "scores.json",
                    "sweep.json",
                }.intersection(files):
                    with contextlib.suppress(OSError):
                        status = os.stat(os.path.join(directory, name), follow_symlinks=False)
                        known.append((directory, name, status.st_size, status.st_mtime_ns))
        return sorted(known)


def waiting(reason: str) -> str:
    """Return the page that is shown while there is no report."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" '
        'content="2"><meta name="viewport" content="width=device-width, initial-scale=1"><meta '
        'name="color-scheme" content="light dark">'
        '<link rel="icon" href="data:,"><title>hgms report</title></head>'
        '<body style="font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; '
        'padding: 0 1rem">'
        "<h1>Nothing to report yet</h1><p>The report comes with the first run that ends.</p>"
        f'<pre style="white-space: pre-wrap">{escaping.escape(reason)}</pre></body></html>'
    )


def server(pages: Pages, port: int = 0) -> ThreadingHTTPServer:
    """Create a server of the newest page on the loopback address.

    Port 0 selects a free port.

    Raises:
        ConfigError: the port is in use or not permitted.
    """
    try:
        return _Server((LOOPBACK, port), pages)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(
            "cannot-serve",
            f"cannot serve on port {port}: {why}",
            place=("--port",),
            hint="use another --port, or 0 for a free one",
        ) from None


class _Server(ThreadingHTTPServer):
    daemon_threads = (
        True  # an open connection of a browser does not prevent the command from ending
    )

    def __init__(self, address: tuple[str, int], pages: Pages) -> None:
        super().__init__(address, _Handler)
        self.pages = pages

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a browser that disconnects during a response."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    # timeout of a request in seconds; otherwise a browser that opens connections early would block
    # a thread
    timeout = 10
    server_version = "hgms"
    sys_version = ""
    server: _Server

    def do_GET(self) -> None:
        if self.refused():
            return
        page = self.server.pages.newest()
        tag = f'"{digest(page)[:32]}"'
        self.answer(HTTPStatus.OK, page, tag)

    do_HEAD = do_GET

    def refused(self) -> bool:
        """Send an error to a request for another host or page, and return whether it did."""
        port = self.connection.getsockname()[1]
        if self.headers.get_all("Host") not in [
            [name if port == 80 else f"{name}:{port}"] for name in NAMES
        ]:
            self.answer(HTTPStatus.FORBIDDEN, b"this is no page of that host\n")
            return True
        if self.path != "/":
            self.answer(HTTPStatus.NOT_FOUND, b"there is one page, at /\n")
            return True
        return False

    def answer(self, status: HTTPStatus, body: bytes, tag: str = "") -> None:
        self.send_response(status)
        kind = "text/html" if status == HTTPStatus.OK else "text/plain"
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if tag:
            self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no requests."""


def serve(pages: Pages, port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C."""
    with server(pages, port) as made:
        try:
            say(f"http://{LOOPBACK}:{made.server_address[1]}/  (Ctrl-C ends)")
            made.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("ended")
