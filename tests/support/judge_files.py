"""A small MT-Bench with answers, and an endpoint that does what a test says."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

# at the end: the folder has a script evaluate.py, and a library has this name
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "llm"))

from evaluation import Evaluate, Judge
from evaluation.judge_calls import ratings_path

from support.source_files import lines

Reply = tuple[int, dict[str, str], str | bytes | None]
"""Status, headers, and a judge's text, or a body as it is, or None for no answer at all."""
Act = Callable[[int, dict[str, Any]], Reply]


def write_bench(folder: Path, count: int, category: str = "writing") -> Path:
    """A benchmark of ``count`` questions of two turns in bench/, and answers in the folder out/."""
    single, multi = "{question}|{answer}", "{question_1}|{answer_1}|{question_2}|{answer_2}"
    kinds = {"single-v1": single, "single-math-v1": single}
    kinds |= {f"{name}-multi-turn": multi for name in list(kinds)}
    given = {"new_tokens": 3, "finished": True, "prompt_tokens": 5, "truncated": False}
    numbers = range(81, 81 + count)
    files: dict[str, list[dict[str, Any]]] = {
        "bench/question": [
            {"question_id": n, "category": category, "turns": [f"q{n - 81}", f"more {n - 81}"]}
            for n in numbers
        ],
        "bench/reference_answer_gpt-4": [],
        "bench/judge_prompts": [
            {"name": name, "system_prompt": "S", "prompt_template": text}
            for name, text in kinds.items()
        ],
        "out/mt-bench.answers": [
            {"id": n, "turn": turn, "text": f"a{n}.{turn} {{x}}", **given}
            for n in numbers
            for turn in (1, 2)
        ],
    }
    for name, rows in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        lines(folder / f"{name}.jsonl", rows)
    return folder / "out"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sums(path: Path, count: int) -> Path:
    """Questions in the format of GSM8K."""
    rows = [
        {"question": f"What is {k} + {'1 + ' * k}1?", "answer": f"It is\n#### {2 * k + 1}"}
        for k in range(count)
    ]
    return lines(path, rows)


def evaluation_of(folder: Path, judge: Any) -> Evaluate:
    bench = str(folder.parent / "bench")
    return Evaluate(benchmarks=("mt-bench",), paths={"mt-bench": bench}, judge=judge)


def records_of(evaluation: Evaluate, folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """The ratings on disk by question and turn, without the judge's name."""
    assert evaluation.judge is not None
    rows = read(ratings_path(evaluation.judge, folder))
    return {(row["id"], row["turn"]): {**row, "judge": None} for row in rows}


def completion(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    head = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
    return json.dumps({**head, "choices": [choice]}).encode()


class Endpoint:
    """An OpenAI-compatible server that does what ``act`` says: given the number of the request
    and its body.
    """

    def __init__(self, act: Callable[[int, dict[str, Any]], Reply]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._over = threading.Event()
        endpoint = self
        lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    number = len(endpoint.bodies)
                    endpoint.bodies.append({"path": self.path, **body})
                    endpoint.headers.append({k.lower(): v for k, v in self.headers.items()})
                try:
                    status, headers, text = act(number, body)
                    if text is None:
                        endpoint._over.wait(30)
                        self.close_connection = True
                        return
                    sent = text if isinstance(text, bytes) else completion(text)
                    kind = {"content-type": "application/json", "content-length": str(len(sent))}
                    self.send_response(status)
                    for key, value in {**kind, **headers}.items():
                        self.send_header(key, value)
                    self.end_headers()
                    self.wfile.write(sent)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def good(number: int, body: dict[str, Any]) -> Reply:
    return 200, {}, f"Because. Rating: [[{mark(body)}]]"


def mark(body: dict[str, Any]) -> int:
    """A rating that depends on nothing but what is asked."""
    return 1 + sum(map(ord, body["messages"][1]["content"])) % 10


def error(status: int, message: str = "no", code: str | None = None) -> Act:
    body = json.dumps({"error": {"message": message, "type": "t", "code": code}}).encode()
    return lambda *_: (status, {}, body)


def stage(folder: Path, url: str | None, **changes: Any) -> Evaluate:
    usual = {"timeout": 5.0, "retries": 3, "concurrency": 2}
    judge = Judge(**{"base_url": url, "model": "test/judge", **usual, **changes})
    return evaluation_of(folder, judge)


def rated(folder: Path, url: str, **changes: Any) -> Any:
    return stage(folder, url, **changes).rate(folder)["mt-bench"]
