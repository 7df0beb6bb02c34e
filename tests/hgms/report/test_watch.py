"""The page of a running comparison: served on this machine alone, and nothing else is."""

from __future__ import annotations

import http.client
import threading
from pathlib import Path

from support.made_runs import write_run

import hgms.report as report
from hgms.report.watch import LOOPBACK, Pages, server


def test_the_page_is_served_to_this_machine_alone(tmp_path: Path) -> None:
    write_run(tmp_path)
    pages = Pages([tmp_path], lambda: report.build([tmp_path]), interval=0.0, rest=0.0)
    served = server(pages)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    connection = http.client.HTTPConnection(*served.server_address[:2], timeout=20)
    answers = []
    for headers in ({}, {"Host": "elsewhere.example"}):
        connection.request("GET", "/", headers=headers)
        answer = connection.getresponse()
        answers.append((answer.status, "halve" in answer.read().decode()))
    served.shutdown()
    served.server_close()
    assert answers == [(200, True), (403, False)]
    assert served.server_address[0] == LOOPBACK == "127.0.0.1"
