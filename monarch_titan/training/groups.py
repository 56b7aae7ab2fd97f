"""Process groups across replicas whose collectives end as soon as somebody says that a member is gone.

TorchFT's groups notice a dead peer when its connection breaks, or else when the timeout is over: a frozen process, a
host without network and NCCL give no sign. The controller knows earlier, and tells all ranks of all other replicas.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torchft.process_group import ProcessGroup

from monarch_titan import upstream
from monarch_titan.config.sections import FaultTolerance
from monarch_titan.training.members import Members


class MemberLost(RuntimeError):
    """A replica of the quorum failed before or during a collective with it."""

    def __init__(self) -> None:
        super().__init__("a replica of the quorum failed")


class LosableGloo(ProcessGroup):
    """Gloo, whose own abort does not end a collective but waits for it.

    Whoever waits is released, and what runs is left to itself: it ends when the connection does. Until then the group
    and its buffers are kept, because the destructor would wait, too.
    """

    def __init__(self, timeout: timedelta, members: Members) -> None:
        super().__init__(0, 1)
        self._timeout, self._members = timeout, members
        self._group: ProcessGroup | None = None
        self._running: list[_Collective] = []
        self._abandoned: list[tuple[Any, list[_Collective]]] = []

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Connect with the members of the present quorum. Raises MemberLost when one is gone meanwhile."""
        self.abort()
        group = torchft.ProcessGroupGloo(self._timeout)
        errors: list[RuntimeError] = []
        settled = threading.Event()

        def connect() -> None:
            try:
                group.configure(*args, **kwargs)
            except RuntimeError as error:  # torch's, for all that can go wrong between hosts
                errors.append(error)
            finally:
                settled.set()

        thread = threading.Thread(target=connect, name="connect", daemon=True)
        thread.start()
        self._members.watch(settled.set)
        settled.wait()
        if self._members.lost:
            raise MemberLost
        thread.join()
        if errors:
            raise errors[0]
        self._group = group

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> _Collective:
        """Reduce in place. Its work raises MemberLost when a member is gone before it is done."""
        if self._members.lost or self._group is None:
            raise MemberLost
        collective = _Collective(self._group.allreduce(tensors, opts), self._members)
        self._running = [*(other for other in self._running if not other.over()), collective]
        self._members.watch(collective.settled.set)
        return collective

    def abort(self) -> None:
        """Let go of the group without waiting for what still runs in it."""
        self._abandoned = [(group, works) for group, works in self._abandoned if not all(w.over() for w in works)]
        running = [collective for collective in self._running if not collective.over()]
        if running:
            self._abandoned.append((self._group, running))
        self._group, self._running = None, []

    def size(self) -> int:
        return self._group.size() if self._group is not None else 1

    def getBackendName(self) -> str:  # noqa: N802
        return "monarch-titan-gloo"


class _Collective(dist.Work):
    """A collective that ends when it is done or its quorum has lost a member, whichever is first."""

    def __init__(self, work: Any, members: Members) -> None:
        super().__init__()
        self._work, self._members = work, members
        self.settled = threading.Event()
        work.get_future().add_done_callback(lambda _: self.settled.set())

    def over(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.settled.wait()
        if self._members.lost and not self.over():
            raise MemberLost
        return self._work.wait()

    def get_future(self) -> Any:
        return self._work.get_future()


class LosableNCCL(torchft.ProcessGroupNCCL):
    """NCCL (RCCL on AMD), which can be aborted from another thread."""

    def __init__(self, timeout: timedelta, members: Members) -> None:
        super().__init__(timeout)
        self._members = members

    def allreduce(self, tensors: list[Any], opts: Any) -> Any:
        self._members.watch(self.abort)
        return super().allreduce(tensors, opts)


def process_group(config: FaultTolerance, members: Members) -> LosableGloo | LosableNCCL:
    """The group across replicas, empty until the first quorum configures it."""
    backend = config.process_group
    if backend == "auto":
        backend = "gloo" if upstream.accelerator() is None else "nccl"
    kind = LosableGloo if backend == "gloo" else LosableNCCL
    return kind(timedelta(milliseconds=config.process_group_timeout_ms), members)
