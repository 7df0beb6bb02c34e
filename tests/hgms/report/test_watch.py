"""The page of a running comparison: served on this machine alone, and nothing else is."""

from __future__ import annotations

import _thread
import http.client
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.helpers import rejects
from support.made_runs import write_run

import hgms.report as report
from hgms.cli import main
from hgms.report.watch import LOOPBACK, Pages, serve, server
from hgms_core import ConfigError

Answer = tuple[int, dict[str, str], str]


class Served:
    """A server under way, and requests to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = Pages([folder], lambda: report.build([folder]), interval=0.0, rest=0.0)
        self.server = server(self.pages)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self.thread.start()

    def ask(self, path: str = "/", method: str = "GET", **headers: str) -> Answer:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=20)
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": f"{LOOPBACK}:{self.port}", **headers}.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, dict(answer.getheaders()), text

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join(20)
        self.server.server_close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("watched")
    write_run(folder, method="halve")
    made = Served(folder)
    yield made
    made.close()


def test_the_page_is_served_and_renewed_when_a_run_ends(served: Served) -> None:
    status, headers, page = served.ask()
    assert status == 200
    assert "halve" in page
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    assert "connect-src 'self'" in page
    assert served.ask(method="HEAD")[1]["ETag"] == headers["ETag"]  # no news: the same page
    assert served.ask(method="HEAD")[2] == ""
    write_run(served.folder, method="another")
    assert served.ask(method="HEAD")[1]["ETag"] != headers["ETag"]
    assert "another" in served.ask(Host=f"localhost:{served.port}")[2]


HERE = LOOPBACK + ":{port}"


@pytest.mark.parametrize(
    ("status", "path", "method", "host"),
    [
        *((404, path, "GET", HERE) for path in ("/report.html", "/favicon.ico", "/?a", "/..", "*")),
        *((404, path, "GET", HERE) for path in ("/../../etc/passwd", "/%2e%2e/")),
        (404, "http://elsewhere.example/", "GET", HERE),
        *((403, "/", "GET", host) for host in ("", "elsewhere.example", "127.0.0.1")),
        *((403, "/", "GET", host) for host in ("elsewhere.example:{port}", "0.0.0.0:{port}")),
        *(
            (403, "/", "GET", host)
            for host in ("localhost:1", "127.0.0.1.elsewhere.example:{port}")
        ),
        *((501, "/", method, HERE) for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE")),
    ],
)
def test_nothing_but_the_page_is_served_and_to_this_machine_alone(
    served: Served, status: int, path: str, method: str, host: str
) -> None:
    found, _, text = served.ask(path, method, Host=host.format(port=served.port))
    assert (found, "halve" in text) == (status, False)
    assert served.server.server_address[0] == "127.0.0.1"


def test_two_hosts_in_a_request_are_refused(served: Served) -> None:
    with socket.create_connection((LOOPBACK, served.port), timeout=20) as connection:
        connection.sendall(
            f"GET / HTTP/1.1\r\nHost: {LOOPBACK}:{served.port}\r\nHost: elsewhere\r\n\r\n".encode()
        )
        assert b" 403 " in connection.recv(100)


def test_while_there_is_no_result_the_page_says_so_and_waits(tmp_path: Path) -> None:
    pages = Pages(
        [tmp_path / "<runs>"], lambda: report.build([tmp_path / "<runs>"]), interval=0.0, rest=0.0
    )
    page = pages.newest().decode()
    assert "Nothing to report yet" in page
    assert "&lt;runs&gt;)" in page
    assert 'http-equiv="refresh"' in page
    write_run(tmp_path / "<runs>")
    assert "Nothing to report yet" not in pages.newest().decode()


def test_pages_are_not_made_more_often_than_asked(tmp_path: Path) -> None:
    write_run(tmp_path)
    made = []

    def build() -> report.Study:
        made.append(1)
        return report.build([tmp_path])

    pages = Pages([tmp_path], build, interval=1000.0)
    pages.newest()
    write_run(tmp_path, method="another")
    pages.newest()
    assert len(made) == 1


def test_a_port_that_is_taken_is_said(served: Served) -> None:
    with rejects("cannot-serve", "--port", of=ConfigError) as caught:
        server(served.pages, served.port)
    assert f"port {served.port}:" in caught.value.message


@pytest.mark.parametrize("flags", [["--out", "a.html"], ["--json"], ["--steps"]])
def test_flags_that_write_are_refused(served: Served, flags: list[str]) -> None:
    result = CliRunner().invoke(main, ["report", str(served.folder), "--watch", *flags])
    assert result.exit_code == 2
    assert f"({flags[0]})" in result.output


def test_ctrl_c_ends_it_and_says_so(served: Served) -> None:
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 1:
            threading.Timer(0.1, _thread.interrupt_main).start()

    serve(served.pages, 0, say)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/  \(Ctrl-C ends\)", lines[0])
    assert lines[1:] == ["ended"]
