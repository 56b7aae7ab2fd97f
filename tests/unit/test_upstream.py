"""Contracts with the libraries underneath. A failure here mostly means that a workaround can be deleted."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
from torch.nn.attention.flex_attention import flex_attention
from torchft.coordination import LighthouseServer, ManagerClient, ManagerServer
from torchtitan.components.optimizer.utils import init_optim_state
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.utils import get_device_info

from monarch_titan import upstream

TORCH = Version(torch.__version__)

no_accelerator = pytest.mark.skipif(upstream.accelerator() is not None, reason="about machines without an accelerator")


def python(code, **environment):
    """What a new interpreter prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HYPERACTOR_")} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# torch


def test_torch_lacks_set_timeout_before_2_14():
    found = getattr(dist, "set_timeout", None)
    has_it = found is not None and found.__module__ != upstream.__name__  # another test may have installed ours
    assert has_it == (TORCH.release >= (2, 14)), (
        "torch.distributed.set_timeout is there or not against expectation: correct the version in the docstring of "
        "install_cpu_device(), or delete its set_timeout where no supported torch lacks it."
    )


def test_spmd_backend_needs_dtensor_agrees_with_the_version_of_torch():
    assert upstream.spmd_backend_needs_dtensor() == (TORCH.release < (2, 14))


@pytest.mark.parametrize(
    ("version", "needed"),
    [
        ("2.13.0+cpu", True),
        ("2.13.1", True),
        ("2.14.0.dev20260101", False),
        ("2.14.0a0+git1", False),
        ("2.14.0", False),
    ],
)
def test_nightly_builds_of_the_next_torch_count_as_it(monkeypatch, version, needed):
    monkeypatch.setattr(torch, "__version__", version)
    assert upstream.spmd_backend_needs_dtensor() is needed


def test_flex_attention_does_not_train_on_a_cpu():
    x = torch.ones(1, 1, 16, 16, requires_grad=True)
    try:
        flex_attention(x, x, x)
    except NotImplementedError:
        return
    pytest.fail("FlexAttention has a backward pass on CPU now: training/cpu.py needs no SdpaAttention.")


def test_gloo_rejects_pre_multiplied_sums():
    store = dist.HashStore()
    group = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=10))
    options = dist.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(0.5)
    try:
        group.allreduce([torch.ones(1)], options).wait()
    except RuntimeError as error:
        assert "PREMUL_SUM" in str(error) or "ReduceOp" in str(error)
        return
    pytest.fail("gloo takes PREMUL_SUM now: use_sum_reductions() in training/cpu.py can be deleted.")


def in_two_ranks(run):
    """What ``run(gloo group, rank)`` returns or raises on each of two ranks, which are threads here."""
    store = dist.HashStore()

    def rank(number):
        try:
            return run(dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=10)), number)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(rank, range(2)))


def test_gloo_exchanges_no_parts_of_unequal_size():
    def exchange(group, rank):
        sent = [torch.full((rank + 1,), float(rank)) for _ in range(2)]
        group.alltoall([torch.empty(1), torch.empty(2)], sent, dist.AllToAllOptions()).wait()

    assert all(isinstance(error, RuntimeError) for error in in_two_ranks(exchange)), (
        "gloo's alltoall takes parts of any size now: upstream._all_to_all can be deleted."
    )


def test_all_to_all_exchanges_parts_of_unequal_size(monkeypatch):
    def single(output, given, output_sizes, sizes, group):
        group.alltoall_base(output, given, output_sizes, sizes).wait()

    def exchange(group, rank):
        sent = [torch.full((rank + 1, peer + 1), 10.0 * rank + peer) for peer in range(2)]
        received = [torch.empty(peer + 1, rank + 1) for peer in range(2)]
        upstream._all_to_all(received, sent, group=group)
        return received

    monkeypatch.setattr(dist, "all_to_all_single", single)
    for rank, received in enumerate(in_two_ranks(exchange)):
        for peer, part in enumerate(received):
            assert torch.equal(part, torch.full((peer + 1, rank + 1), 10.0 * peer + rank))


class TwoMicrobatches(PipelineScheduleSingle):
    """A schedule that only notes what it is to run."""

    def _step_microbatches(self, *given, **options):
        self.given = (*given, options)


def schedule():
    stage = SimpleNamespace(num_stages=2, is_last=False, has_backward=True, clear_runtime_states=lambda: None)
    return TwoMicrobatches(stage, 2, loss_fn=lambda: None)


def test_schedules_take_microbatches_since_2_14():
    takes = "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters
    assert takes == (TORCH.release >= (2, 14)), (
        "torch's pipeline schedules take microbatches or not against expectation: correct the version in the docstring "
        "of take_microbatches(), or delete it where no supported torch lacks them."
    )


@pytest.mark.parametrize("method", ["step", "eval"])
def test_schedule_runs_the_microbatches_that_it_is_given(method):
    given = schedule()
    upstream.take_microbatches(given)
    args, kwargs, targets, losses = [("a",), ("b",)], [{"k": 1}, {"k": 2}], ["s", "t"], []
    for _ in range(2):  # a second step is like the first
        getattr(given, method)(arg_mbs=args, kwarg_mbs=kwargs, target_mbs=targets, losses=losses)
        assert given.given[:4] == (args, kwargs, targets, losses)
    getattr(given, method)(arg_mbs=None, kwarg_mbs=kwargs, target_mbs=None, losses=None)  # a stage in the middle
    assert given.given[1:4] == (kwargs, None, None)
    assert given.given[0] in (None, [(), ()])


def test_context_parallel_masks_come_in_blocks():
    mesh = SimpleNamespace(size=lambda: 2)
    for length, fits in ((2 * upstream.CONTEXT_PARALLEL_BLOCK, True), (3 * upstream.CONTEXT_PARALLEL_BLOCK, False)):
        try:
            _create_cp_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, length, length, mesh)
        except NotImplementedError:
            assert not fits, "context parallelism knows larger blocks: correct upstream.CONTEXT_PARALLEL_BLOCK."
        except AttributeError:  # where the mesh would be asked for its rank, after the check
            assert fits, "context parallelism divides any sequence now: upstream.CONTEXT_PARALLEL_BLOCK can go."


# TorchTitan


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
                                      "ZBVZeroBubble", "DualPipeV"])  # fmt: skip
def test_pipelines_of_all_schedules_can_be_checked_on_paper(schedule):
    config = llama3_debugmodel()
    config.parallelism.pipeline_parallel_schedule, config.parallelism.pipeline_parallel_degree = schedule, 2
    upstream.check_pipeline(config, ParallelDims.from_config(config.parallelism, 2))
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.parallelism.pipeline_parallel_degree = 4
    with pytest.raises(ValueError, match="cannot be greater than effective layers"):
        upstream.check_pipeline(config, ParallelDims.from_config(config.parallelism, 4))


@no_accelerator
def test_torchtitan_picks_no_cpu_device_by_itself():
    assert get_device_info()[0] == "cuda", (
        "TorchTitan knows the CPU now: the device half of install_cpu_device() and _CpuDevice can be deleted."
    )


INSTALL = """
from monarch_titan import upstream
upstream.install_cpu_device(); upstream.install_cpu_device()
import torch.distributed as dist, torchtitan.tools.utils as tools
from torchtitan.distributed import utils
print(tools.device_type, utils.device_type, utils.device_module.get_device_name(), utils.device_module.device_count(),
      utils.device_module.get_device_properties(0).total_memory > 0, sorted(utils.device_module.memory_stats())[0],
      utils.device_module.is_available(), callable(dist.set_timeout))
"""


@no_accelerator
def test_the_fake_backend_still_shards_on_an_accelerator_that_is_not_there():
    fake = "utils.init_fake_mode(4); ParallelDims(1, 4, 1, 1, 1, 1, 4).build_mesh()"
    code = f"from torchtitan.distributed import ParallelDims, utils; print({fake.replace('; ', ' or ')}.device_type)"
    assert python(code).splitlines()[-1] == "cuda", (
        "TorchTitan's fake backend needs no accelerator now: fake_world() need not exchange its device."
    )


def test_a_fake_world_is_on_the_cpu_and_gone_afterwards():
    from torchtitan.distributed import ParallelDims, parallel_dims

    device = parallel_dims.device_type
    with upstream.fake_world(3, 4, "partial_dtensor"):
        dims = ParallelDims(1, 4, 1, 1, 1, 1, 4, "partial_dtensor")
        assert (dims.build_mesh().device_type, dims.get_mesh("fsdp").get_local_rank()) == ("cpu", 3)
    assert parallel_dims.device_type == device and not dist.is_initialized()


@no_accelerator
def test_install_cpu_device_reaches_the_modules_imported_later():
    expected = "cpu cpu CPU 2 True active_bytes.all.peak True True"
    assert python(INSTALL, LOCAL_WORLD_SIZE="2").splitlines()[-1] == expected


def test_init_optim_state_counts_a_step():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    init_optim_state(optimizer)
    assert [int(entry["step"]) for entry in optimizer.state.values()] == [1], (
        "init_optim_state counts no step any more: the comment on it in training/healing.py can go."
    )


def test_init_optim_state_does_nothing_where_there_is_a_gradient():
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.Adam([parameter])
    init_optim_state(optimizer)
    assert not optimizer.state, "init_optim_state no longer minds gradients: healing need not clear them."


# Monarch

# Environment variable -> the name under which monarch.config knows it, if it does.
KNOBS = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": None,
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "get_proc_state_max_idle",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "get_actor_state_max_idle",
    "HYPERACTOR_PROCESS_EXIT_TIMEOUT": "process_exit_timeout",
}

MONARCH_CONFIG = """
import json, os
from monarch_titan import upstream
upstream.set_monarch_environment()
from monarch.config import get_global_config
before = get_global_config()
os.environ.update({name: "77s" for name in upstream.MONARCH_ENVIRONMENT})
assert get_global_config() == before, "not read at import"
print(json.dumps({name: str(value) for name, value in before.items()}))
"""


def test_monarch_reads_its_supervision_knobs_from_the_environment_at_import():
    config = json.loads(python(MONARCH_CONFIG))
    for name, value in upstream.MONARCH_ENVIRONMENT.items():
        if KNOBS[name] is not None:
            assert config[KNOBS[name]] == value
    assert not [name for name in config if "poll_freq" in name], (
        "monarch.config.configure() can set all knobs now: set_monarch_environment() can be deleted in favour of it."
    )


def test_knobs_that_the_user_has_set_are_kept():
    config = json.loads(python(MONARCH_CONFIG, **dict.fromkeys(KNOBS, "4s")))
    assert [config[name] for name in KNOBS.values() if name is not None] == ["4s"] * 3


def test_environment_is_left_alone_once_monarch_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "monarch", SimpleNamespace())
    for name in upstream.MONARCH_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    upstream.set_monarch_environment()
    assert not set(upstream.MONARCH_ENVIRONMENT) & set(os.environ)


@pytest.mark.filterwarnings("ignore:monarch.bootstrap_main is deprecated")
def test_monarch_has_no_public_bootstrap_main():
    private = importlib.import_module("monarch._src.actor.bootstrap_main")
    assert callable(private.invoke_main)
    with pytest.warns(DeprecationWarning, match="please use from monarch._src"):
        # Public by its name, deprecated in favour of the private one.
        importlib.reload(importlib.import_module("monarch.bootstrap_main"))
    public = [name for name in dir(importlib.import_module("monarch.actor")) if "bootstrap_main" in name]
    assert not public, f"Monarch has a public {public}: use it in monarch_bootstrap_main()."


def report(status, rank=1):
    """As Monarch 0.7 writes it, shortened."""
    return (
        f"The actor <root>.<trainers.TrainerActor trainer{{'gpus': {rank}/2}}> and all its descendants have failed:\n"
        f"  {status}"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (report("the process this actor was running on failed: Killed(sig=9)"), (1, "killed by SIGKILL")),
        (report("the process this actor was running on failed: Killed(sig=11)", 0), (0, "killed by SIGSEGV")),
        (
            report("the process this actor was running on failed: Stopped(exit_code=3)", 12),
            (12, "its process exited with code 3"),
        ),
        (
            report("the actor <root>.<...> has status:\n      stopped: process exited cleanly"),
            (1, "its process exited with code 0"),
        ),
        (
            report(
                "timeout waiting for message from proc mesh agent while querying for "
                "trainer. The process likely crashed"
            ),
            (1, None),
        ),
        ("Traceback (most recent call last):\nValueError: no such corpus", (None, None)),
        ("", (None, None)),
    ],
)
def test_read_process_report(text, expected):
    assert upstream.read_process_report(text) == expected


# TorchFT


def first_quorum(wrap):
    """Result of the first quorum that a newly started lighthouse gives to a replica."""
    second = timedelta(seconds=10)
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=10)
    server = ManagerServer(
        replica_id="replica_0",
        lighthouse_addr=lighthouse.address(),
        hostname="localhost",
        bind="[::]:0",
        store_addr="localhost:1",
        world_size=1,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=second,
        quorum_retries=0,
    )
    manager = SimpleNamespace(_client=ManagerClient(server.address(), connect_timeout=second))
    wrap(manager)
    try:
        return manager._client._quorum(
            group_rank=0,
            step=0,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=second,
            commit_failures=0,
            init_sync=False,
        )
    finally:
        server.shutdown()
        lighthouse.shutdown()


def test_a_restarted_lighthouse_gives_the_same_quorum_id_again():
    ids = [first_quorum(lambda manager: None).quorum_id for _ in range(2)]
    assert ids[0] == ids[1], (
        "Lighthouses give unique quorum ids now: the ids need no shift in QuorumClient, "
        "and trainers need not hear of a lighthouse's restart."
    )


def test_quorum_client_tells_the_quorums_of_two_lighthouses_apart():
    clients, formed = [], []

    def wrap(attempt):
        return lambda manager: clients.append(upstream.QuorumClient(manager, lambda: attempt, formed.append))

    results = [first_quorum(wrap(attempt)) for attempt in (0, 1)]
    assert results[1].quorum_id - results[0].quorum_id == upstream.QuorumClient.IDS_PER_LIGHTHOUSE
    assert [client.quorum_id for client in clients] == [result.quorum_id for result in results]
    assert formed == [["replica_0"]] * 2
    # The rest of the answer is as TorchFT gave it, with nothing missing that its manager reads.
    plain = first_quorum(lambda manager: None)
    for name in ("replica_rank", "replica_world_size", "max_step", "max_world_size", "max_replica_rank", "heal"):
        assert getattr(results[1], name) == getattr(plain, name)
    assert {name for name in dir(plain) if not name.startswith("_")} == set(vars(results[0]))


def test_quorum_client_asks_for_the_attempt_after_the_answer():
    attempt = 0

    def quorum(**request):
        nonlocal attempt
        attempt = 2  # restarted while we waited
        return SimpleNamespace(
            quorum_id=7, heal=True, replica_ids=["attempt_0_replica_1:f00", "attempt_2_replica_0:ba5"]
        )

    manager = SimpleNamespace(_client=SimpleNamespace(_quorum=quorum, should_commit=lambda: "vote"))
    formed = []
    client = upstream.QuorumClient(manager, lambda: attempt, formed.extend)
    assert manager._client is client
    assert client._quorum(step=0).quorum_id == client.quorum_id == 2_000_007
    assert client.heal
    assert formed == ["attempt_0_replica_1", "attempt_2_replica_0"]
    assert client.should_commit() == "vote"


def test_owner_is_what_a_configuration_builds():
    from torchtitan.components.tokenizer import BaseTokenizer

    from monarch_titan.training.tokenizer import ByteTokenizer

    assert upstream.owner(ByteTokenizer.Config) is ByteTokenizer
    assert isinstance(ByteTokenizer.Config().build(), BaseTokenizer)
    assert not hasattr(ByteTokenizer.Config, "owner"), (
        "TorchTitan has a public name for it now: delete upstream.owner()."
    )
