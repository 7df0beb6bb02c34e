"""The executor `slurm` with processes of this machine in place of batch jobs: a plugin, by
submitit's substitute for SLURM. Ctrl-C on the terminal does not reach these processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

from attrs import define

from hgms.executors.slurm.executor import Slurm
from hgms_core import hookimpl


def stand_in(submitit: Any, folder: Path) -> Any:
    """Return an executor of submitit whose controllers run in a separate session, as batch jobs do.

    Their output is written to a log.

    Controllers of ``submitit.LocalExecutor`` share the terminal, so Ctrl-C reaches them too. They
    print a traceback next to HGMS's message, and kill a run after one second, even if it has not
    saved its state.
    """
    local = submitit.local.local

    class StandIn(submitit.LocalExecutor):
        def _submit_command(self, command: str) -> Any:
            own = self.parameters
            gpus = own.get("gpus_per_node", 0)
            env = {
                **os.environ,
                "SUBMITIT_EXECUTOR": "local",
                "SUBMITIT_STDERR_TO_STDOUT": "",
                "SUBMITIT_LOCAL_NTASKS": "1",
                "SUBMITIT_LOCAL_COMMAND": command,
                "SUBMITIT_LOCAL_NODEID": "0",
                "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * own["timeout_min"]),
                "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
                "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
                "SUBMITIT_LOCAL_WITH_SHELL": "",
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
            }
            with (Path(self.folder) / "controllers.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "submitit.local._local", str(self.folder)],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            return Process(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])

    class Process(local.LocalJob):  # type: ignore[name-defined]
        def cancel(self, check: bool = True) -> None:
            """Send SIGTERM as scancel does; the controller forwards it, and the run saves its
            state.
            """
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)

    return StandIn(folder)


@define(eq=False)
class SlurmHere(Slurm):
    name: ClassVar[str] = "slurm-here"

    def _queue(self, submitit: Any, folder: Path) -> Any:
        return stand_in(submitit, folder)


@hookimpl
def hgms_register_executors() -> list[type[Any]]:
    return [SlurmHere]
