"""TorchFT's Manager as a replica under the controller uses it."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torchft
from torchtitan.components.dataloader import DataloaderExhaustedError

from monarch_titan import upstream
from monarch_titan.config.sections import FaultTolerance, Monarch
from monarch_titan.control.events import Quorum, QuorumFormed, QuorumRequested
from monarch_titan.training.replica import ReplicaContext

logger = logging.getLogger(__name__)

# A respawned replica has trained nothing. Any step below the first one makes TorchFT heal it, also while its peers are
# still at outer step 0, where TorchFT would otherwise take it for their equal.
NEEDS_STATE = -1

# Wait before asking again for a quorum in which nobody had a state to give.
ASK_AGAIN_SECONDS = 0.5

# How often the manager's server asks a lighthouse that does not answer. It gives up with the quorum's own timeout.
LIGHTHOUSE_RETRIES = 1_000_000


class PeersFinished(DataloaderExhaustedError):
    """The peers had trained all steps: their state is now ours, and there is nothing left to train.

    A DataloaderExhaustedError, because that is how TorchTitan's loop cancels a step and ends without failing.
    """


class NeverCommits(RuntimeError):
    """Outer steps failed to commit too often in a row."""


def process_group(config: FaultTolerance) -> torchft.ProcessGroup:
    """The group across replicas, empty until the first quorum configures it."""
    backend = config.process_group
    if backend == "auto":
        backend = "gloo" if upstream.accelerator() is None else "nccl"
    kind = torchft.ProcessGroupGloo if backend == "gloo" else torchft.ProcessGroupNCCL
    return kind(timeout=timedelta(milliseconds=config.process_group_timeout_ms))


class ReplicaManager(torchft.Manager):
    """Keeps this replica in quorum with its peers, and in no quorum without their state.

    Synchronous quorum only: with the asynchronous one a survivor may serve its state while FSDP has the parameters
    gathered.
    """

    def __init__(self, fault_tolerance: FaultTolerance, monarch: Monarch, context: ReplicaContext) -> None:
        timeout = timedelta(milliseconds=fault_tolerance.process_group_timeout_ms)
        super().__init__(
            pg=process_group(fault_tolerance),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=monarch.live_replicas_needed,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=monarch.quorum_timeout_seconds),
            connect_timeout=timeout,
            lighthouse_addr=context.lighthouse,
            replica_id=f"replica_{context.replica}",
            hostname=context.hostname,
            # All replicas start from one seed or one checkpoint. TorchFT's own way would throw away the first window
            # of every replica but one.
            init_sync=False,
            quorum_retries=LIGHTHOUSE_RETRIES,
        )
        self.context = context
        self.client = upstream.QuorumClient(self, lambda: context.lighthouse_attempt)
        self.held = False
        """Whether this replica has trained all steps and only helps others."""
        self.needs_state = monarch.num_replicas > 1 and (context.attempt > 0 or context.lacks_part)
        """Whether the next quorum is useless to us unless a peer gives us its state."""
        self.healed = False
        """Whether the last quorum replaced our state by a peer's."""
        self._replicas_needed = monarch.live_replicas_needed
        self._quorum_timeout_seconds = monarch.quorum_timeout_seconds
        self._commit_retries = monarch.recovery.commit_retries
        self._failed_in_a_row = 0
        self._peer_was_held = False
        self.register_state_dict_fn("held", self._note_peer, lambda: self.held)
        if self.needs_state:
            self.load_state_dict({"step": NEEDS_STATE, "batches_committed": 0})

    def _note_peer(self, held: bool) -> None:
        """Called by TorchFT as the first of the state functions when a peer's state is applied."""
        self.healed, self._peer_was_held = True, held

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Join the next quorum, taking a peer's state where we are behind.

        Raises PeersFinished when that peer had already trained all steps, TimeoutError when nobody had a state to give
        for ``monarch.quorum_timeout_seconds``, RuntimeError when a peer's state could not be taken.
        """
        deadline = time.monotonic() + self._quorum_timeout_seconds
        while True:
            self._quorum_once(allow_heal, shrink_only, timeout)
            if not self.needs_state or self.healed:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no peer had a state to heal from within monarch.quorum_timeout_seconds "
                    f"({self._quorum_timeout_seconds})."
                )
            time.sleep(ASK_AGAIN_SECONDS)
        self.needs_state = False
        if self.healed and self._peer_was_held:
            raise PeersFinished("the peers had trained all steps")

    def _quorum_once(self, allow_heal: bool, shrink_only: bool, timeout: timedelta | None) -> None:
        ids = self.context.ids()
        begin = time.monotonic()
        self.healed = False
        if not self.held:
            self.context.report(QuorumRequested(**ids))
        super().start_quorum(allow_heal, shrink_only, timeout)
        if self.client.heal and not self.healed:
            # Our peers count on us in their next collective: fail now rather than let them wait.
            raise RuntimeError(f"could not take the state of a peer: {_last_line(self.errored())}")
        if not self.held:
            self.context.report(QuorumFormed(**ids))
        if self.context.rank == 0:
            self.context.report(
                Quorum(
                    replica=self.context.replica,
                    quorum_id=self.client.quorum_id,
                    participants=self.num_participants(),
                    healing=self.healed,
                    seconds=round(time.monotonic() - begin, 4),
                )
            )

    def attend(self) -> bool:
        """While held: take part in one quorum so that a peer can heal. True when it was we who healed."""
        self.held = True
        try:
            self.start_quorum()
        except PeersFinished:
            return True
        return False

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """TorchFT's vote of this replica's ranks. Raises NeverCommits, with the cause, after too many failures."""
        committed = super().should_commit(timeout)
        self._failed_in_a_row = 0 if committed else self._failed_in_a_row + 1
        if self._failed_in_a_row > self._commit_retries:
            raise NeverCommits(
                f"{self._failed_in_a_row} outer steps in a row did not commit "
                f"(monarch.recovery.commit_retries = {self._commit_retries}); the last one: {self.why_not()}"
            )
        return committed

    def why_not(self) -> str:
        """Why the last outer step did not commit, in one line."""
        if (error := self.errored()) is not None:
            return _last_line(error)
        if self.num_participants() < self._replicas_needed:
            return f"{self.num_participants()} of at least {self._replicas_needed} replicas took part"
        return "another rank of this replica voted against it"


def _last_line(error: BaseException | None) -> str:
    """The first line of what went wrong; TorchFT appends whole tracebacks to its messages."""
    original = getattr(error, "original_exception", error)
    lines = str(original).strip().splitlines() or [type(original).__name__]
    return lines[0][:300]
