"""A run on the device, killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.helpers import run_files
from support.processes import rows_written

from hgms.runs import RunConfig, run_config

pytestmark = pytest.mark.nightly

CONFIG = """
seed = 3

[task]
name = "hyper-cleaning"
dataset = "digits"
corruption = 0.5
train_size = 100
hidden = 8

[method]
name = "hg-ms"
generator = {{ count = 3, steps = 5, noise = 0.05, batch_size = 20 }}

[budget]
outer_steps = {steps}

[run]
device = "{device}"
threads = 1
evaluate_every = 5
checkpoint_seconds = 0.0
"""
STEPS = 40
# As docs/how-to/run-on-gpus.md says it.
DETERMINISTIC = """
import sys, torch
torch.use_deterministic_algorithms(True)
from hgms.cli import main
main(sys.argv[1:])
"""


def _prepared(folder: Path, device: torch.device, steps: int = STEPS) -> RunConfig:
    folder.mkdir()
    (folder / "run.toml").write_text(CONFIG.format(steps=steps, device=device.type))
    text = (folder / "run.toml").read_text().replace("[run]", f'[run]\nout = "{folder / "runs"}"')
    return RunConfig.from_toml(text)


def _folder(place: Path) -> Path:
    [found] = place.glob("runs/*/*/seed-*")
    return found


@pytest.mark.usefixtures("deterministic", "real")
def test_killed_and_resumed_equals_left_alone(tmp_path: Path, device: torch.device) -> None:
    """With noise and minibatches, under deterministic algorithms: bit for bit, also from one
    process to another.
    """
    run_config(_prepared(tmp_path / "whole", device))

    place = tmp_path / "killed"
    config = _prepared(place, device)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            DETERMINISTIC,
            "run",
            "run.toml",
            "--set",
            f"run.out={place / 'runs'}",
        ],
        cwd=place,
        env=os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    until = time.monotonic() + 90
    while process.poll() is None and rows_written(place) < STEPS // 6 and time.monotonic() < until:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL, f"it ended by itself: {said.decode()}"
    done = rows_written(place)
    assert 0 < done < STEPS, f"killed after {done} of {STEPS} steps: {said.decode()}"

    result = run_config(config, resume=True)
    assert result.info.resumed_from is not None
    assert result.theta["logits"].device.type == device.type
    one, other = (run_files(_folder(each)) for each in (tmp_path / "whole", place))
    assert len(one) == 4, sorted(one)
    assert one == other
