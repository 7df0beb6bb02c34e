"""The judge and ``transformers serve``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.judged import Endpoint, Reply, evaluation_of, records_of, write_bench

from hgms_mix.evaluation import Judge

pytest.importorskip("openai", reason="the extra hgms[llm] is not installed")


@pytest.mark.nightly
def test_a_real_server_with_a_small_model(tmp_path: Path) -> None:
    """``transformers serve`` with a model trained here to say ``[[7]]``, once as it is and once
    behind a proxy that loses, turns away and garbles."""
    pytest.importorskip("fastapi", reason="transformers serve needs fastapi and uvicorn")
    pytest.importorskip("uvicorn", reason="transformers serve needs fastapi and uvicorn")
    saved = tmp_path / "judge"
    folder = write_bench(tmp_path, 5)
    says_seven(saved)
    with served(saved) as url:
        usual = {"model": str(saved), "max_tokens": 12, "backoff": 0.01, "concurrency": 2}
        evaluation = evaluation_of(folder, Judge(base_url=url, timeout=60.0, **usual))
        result = evaluation.rate(folder)["mt-bench"]
        assert (result["score"], result["rated"], result["failed"]) == (7.0, 10, 0)
        assert {record["reply"] for record in records_of(evaluation, folder).values()} == {"[[7]]"}

        def proxy(number: int, body: dict[str, Any]) -> Reply:
            troubles: dict[int, Reply] = {
                1: (429, {"retry-after": "0.2"}, b'{"error": {"message": "slow down"}}'),
                3: (200, {}, None),
                5: (200, {}, b'{"choices": [{"mess'),
            }
            if number in troubles:
                return troubles[number]
            request = urllib.request.Request(
                url + "/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                return 200, {}, bytes(reply.read())

        behind = Endpoint(proxy)
        evaluation = evaluation_of(folder, Judge(base_url=behind.url, timeout=4.0, **usual))
        result = evaluation.rate(folder)["mt-bench"]
        behind.close()
        assert (result["score"], result["rated"], result["failed"]) == (7.0, 10, 0)
        assert len(behind.bodies) == 13


def says_seven(folder: Path) -> None:
    """A two-layer Llama that answers whatever it is asked with ``[[7]]``."""
    import torch
    import transformers

    from hgms_mix.lm import BaseModel

    tokenizer = BaseModel(config={"model_type": "llama"}, tokenizer="bytes").load_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}>"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=512,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = transformers.LlamaForCausalLM(settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        reply = [*tokenizer("[[7]]")["input_ids"], tokenizer.eos_token_id]
        for _ in range(400):
            prompt = torch.randint(32, 127, (16, int(torch.randint(4, 60, ()))))
            prompt[:, -1] = ord(">")
            tokens = torch.cat([prompt, torch.tensor(reply).expand(16, -1)], 1)
            labels = tokens.clone()
            labels[:, : prompt.shape[1]] = -100
            loss = model(input_ids=tokens, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert loss.item() < 0.05
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("transformers")),
        "serve",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = folder.parent / "serve.log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*command, "--device", "cpu"], stdout=file, stderr=file, env=environment
        ) as process,
    ):
        try:
            until = time.monotonic() + 180
            while True:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                        break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.3)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
