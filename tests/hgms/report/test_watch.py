"""The page of a running comparison: served on this machine alone, and nothing else is."""

from __future__ import annotations

import http.client
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.helpers import rejects
from support.made_runs import write_run

import hgms.report as report
from hgms.report.watch import LOOPBACK, Pages, serve, server
from hgms_core import ConfigError


def test_the_page_is_served_to_this_machine_alone(tmp_path: Path) -> None:
    write_run(tmp_path)
    pages = Pages([tmp_path], lambda: report.build([tmp_path]), interval=0.0, rest=0.0)
    served = server(pages)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    connection = http.client.HTTPConnection(*served.server_address[:2], timeout=20)
    answers = []
    elsewhere = {"Host": "elsewhere.example"}
    requests = (("GET", "/", {}), ("GET", "/", elsewhere), ("GET", "/x", {}), ("HEAD", "/", {}))
    for method, path, headers in requests:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        answers.append((answer.status, "halve" in answer.read().decode()))
    served.shutdown()
    served.server_close()
    assert answers == [(200, True), (403, False), (404, False), (200, False)]
    assert served.server_address[0] == LOOPBACK == "127.0.0.1"


def test_there_is_a_page_before_the_first_run_and_another_one_after_it(tmp_path: Path) -> None:
    pages = Pages([tmp_path], lambda: report.build([tmp_path]), interval=0.0, rest=0.0)
    before = pages.newest()
    write_run(tmp_path)
    after = pages.newest()
    assert (b"halve" in before, b"halve" in after, pages.newest() is after) == (False, True, True)


def test_a_port_in_use_is_an_error_and_ctrl_c_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages([tmp_path], lambda: report.build([tmp_path]))
    with server(pages) as taken, rejects("cannot-serve", "--port", of=ConfigError):
        server(pages, taken.server_address[1])
    said: list[str] = []

    def forever(_served: Any, poll_interval: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", forever)
    serve(pages, 0, said.append)
    assert (said[0].startswith(f"http://{LOOPBACK}:"), len(said)) == (True, 2)
