"""The page of a running comparison: served on this machine alone, and nothing else is."""

from __future__ import annotations

import _thread
import http.client
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.helpers import rejects
from support.made_runs import write_run

import hgms.report as report
from hgms.report.watch import LOOPBACK, Pages, serve, server
from hgms_core import ConfigError


def pages_of(folder: Path, interval: float = 0.0) -> Pages:
    return Pages([folder], lambda: report.build([folder]), interval=interval, rest=0.0)


class Served:
    """A server under way, and requests to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = pages_of(folder)
        self.server = server(self.pages)
        self.port = self.server.server_address[1]

    def ask(
        self, path: str = "/", method: str = "GET", hosts: tuple[str, ...] = (LOOPBACK + ":{port}",)
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=20)
        connection.putrequest(method, path, skip_host=True)
        for host in hosts:
            connection.putheader("Host", host.format(port=self.port))
        connection.endheaders()
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, dict(answer.getheaders()), text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("watched")
    write_run(folder, method="halve")
    made = Served(folder)
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join(20)
    made.server.server_close()


def test_the_page_is_served_and_renewed_when_a_run_ends(served: Served) -> None:
    status, headers, page = served.ask()
    assert (status, "halve" in page, "connect-src 'self'" in page) == (200, True, True)
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    _, again, nothing = served.ask(method="HEAD")
    assert (again["ETag"], nothing) == (headers["ETag"], "")  # no news: the same page
    write_run(served.folder, method="another")
    assert served.ask(method="HEAD")[1]["ETag"] != headers["ETag"]
    assert "another" in served.ask(hosts=("localhost:{port}",))[2]


HERE = LOOPBACK + ":{port}"


@pytest.mark.parametrize(
    ("status", "path", "method", "hosts"),
    [
        *((404, path, "GET", (HERE,)) for path in ("/report.html", "/?a", "/..", "*")),
        *((404, path, "GET", (HERE,)) for path in ("/../../etc/passwd", "/%2e%2e/")),
        (404, "http://elsewhere.example/", "GET", (HERE,)),
        *((403, "/", "GET", hosts) for hosts in ((), ("127.0.0.1",), (HERE, "elsewhere"))),
        *((403, "/", "GET", (f"{host}:{{port}}",)) for host in ("elsewhere.example", "0.0.0.0")),
        (403, "/", "GET", ("localhost:1",)),
        (403, "/", "GET", ("127.0.0.1.elsewhere.example:{port}",)),
        *((501, "/", method, (HERE,)) for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE")),
    ],
)
def test_nothing_but_the_page_is_served_and_to_this_machine_alone(
    served: Served, status: int, path: str, method: str, hosts: tuple[str, ...]
) -> None:
    found, _, text = served.ask(path, method, hosts)
    assert (found, "halve" in text) == (status, False)
    assert served.server.server_address[0] == "127.0.0.1"


def test_a_page_says_that_there_is_no_result_and_is_not_made_more_often_than_asked(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "<runs>"
    pages, slow = pages_of(folder), pages_of(folder, interval=1000.0)
    page = pages.newest().decode()
    for part in ("Nothing to report yet", "&lt;runs&gt;)", 'http-equiv="refresh"'):
        assert part in page
    write_run(folder)
    first = slow.newest()
    assert b"Nothing to report yet" not in first
    write_run(folder, method="another")
    assert slow.newest() == first != pages.newest()


def test_a_port_that_is_taken_is_said(served: Served) -> None:
    with rejects("cannot-serve", "--port", of=ConfigError) as caught:
        server(served.pages, served.port)
    assert f"port {served.port}:" in caught.value.message


def test_ctrl_c_ends_it_and_says_so(served: Served) -> None:
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 1:
            threading.Timer(0.1, _thread.interrupt_main).start()

    serve(served.pages, 0, say)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/  \(Ctrl-C ends\)", lines[0])
    assert lines[1:] == ["ended"]
