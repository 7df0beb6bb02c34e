"""The ranks of a run as threads of this process, by the groups that torch tests itself with."""

from __future__ import annotations

import os
import threading
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hgms.distributed import launcher


class _Own(threading.local, UserDict):  # type: ignore[type-arg,misc]
    """A dictionary that each thread has for itself."""


def on_ranks(*parts: Callable[[], Any]) -> list[Any]:
    """Run each part as a rank, as if torchrun had started it, the first in this thread. Return what
    they return; an error of one ends them all.

    What torch keeps for the process cannot differ between them: forward mode, numbers of threads.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    count = len(parts)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    store = dist.HashStore()
    init = dist.init_process_group

    def joined(_backend: str, **named: Any) -> None:
        init("threaded", **named)

    def rank(number: int) -> None:
        environ.update(RANK=str(number), WORLD_SIZE=str(count), LOCAL_RANK=str(number))
        try:
            results[number] = parts[number]()
        except BaseException as error:  # of a thread, too
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    with pytest.MonkeyPatch.context() as patch:
        environ = _Own(os.environ)
        patch.setattr(launcher, "os", type("Os", (), {"environ": environ}))
        patch.setattr(launcher, "_MET", _Own({"groups": 0, "store": store}))
        patch.setattr(dist, "init_process_group", joined)
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        threaded._install_threaded_pg()
        try:
            threads = [threading.Thread(target=rank, args=(number,)) for number in range(1, count)]
            for thread in threads:
                thread.start()
            rank(0)
            for thread in threads:
                thread.join()
        finally:
            threaded._uninstall_threaded_pg()
            threaded.ProcessLocalGroup.reset()
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return results
