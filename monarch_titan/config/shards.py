"""What one rank of a replica holds, by doing to the model on the meta device what TorchTitan does to the real one.

Nothing is computed by a rule of ours: the fake process group makes this process any rank of any replica,
``build_mesh`` builds that replica's meshes, and the model's own pipelining and parallelizing functions split it and
shard it over them. Meta tensors have shapes and no memory: a rank of the 671B model over 256 costs half a second.

    model = MetaModel(config)
    with model.on_rank(32) as part:
        sum(parameter.to_local().numel() for module in part.modules for parameter in module.parameters())

Left out is what does not change what a rank holds: activation checkpointing and compilation, which set global state,
and symmetric memory, which needs the GPU.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.tools.utils import set_default_dtype

from monarch_titan import upstream
from monarch_titan.config.errors import ConfigError

if TYPE_CHECKING:
    from monarch_titan.training.trainer import MonarchTrainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One rank's part of the model, on the meta device, valid while the rank is."""

    rank: int
    coordinates: dict[str, int]
    """The rank's index along each axis of the dense mesh, slowest first, then of the experts' (``efsdp``, ``ep``)."""
    modules: list[Any]
    """TorchTitan's model, or its part in each pipeline stage of this rank."""
    schedule: Any
    """TorchTitan's pipeline schedule; None without pipeline parallelism."""


class MetaModel:
    """The whole model of a configuration, and what becomes of it on each rank of a replica.

    The configuration is copied. Raises ConfigError where TorchTitan refuses it.
    """

    def __init__(self, config: MonarchTrainer.Config) -> None:
        self.config = config = copy.deepcopy(config)
        self.world_size = config.monarch.ranks_per_replica
        if upstream.spmd_backend_needs_dtensor():
            config.parallelism.spmd_backend = "partial_dtensor"
        config.parallelism.enable_fsdp_symm_mem = False
        self.dims = ParallelDims.from_config(config.parallelism, self.world_size)
        with _refusals():
            config.model_spec.model.update_from_config(config=config)
            if config.override.imports:
                apply_overrides(config.override, config)
            with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
                self.whole: Any = config.model_spec.model.build()

    def first_ranks(self) -> list[int]:
        """The first rank of each pipeline rank: it holds most of those that share its stages.

        ``torch.chunk``, by which both DTensor and FSDP2 shard, gives the first ranks the larger pieces.
        """
        return [index * self.world_size // self.dims.pp for index in range(self.dims.pp)]

    @contextlib.contextmanager
    def on_rank(self, rank: int) -> Generator[Part]:
        """Split and shard the model as on ``rank`` of a replica, which this process is until the block ends."""
        backend = self.config.parallelism.spmd_backend
        with upstream.fake_world(rank, self.world_size, backend):
            dims = ParallelDims.from_config(self.config.parallelism, self.world_size)
            with _refusals():
                dims.build_mesh()
                modules, schedule = self._split(dims)
            yield Part(rank=rank, coordinates=_coordinates(dims), modules=modules, schedule=schedule)

    def _split(self, dims: ParallelDims) -> tuple[list[Any], Any]:
        config, spec = self.config, self.config.model_spec
        arguments = {
            "parallel_dims": dims,
            "training": config.training,
            "parallelism": config.parallelism,
            "compile_config": CompileConfig(),
            "ac_config": None,
            "dump_folder": config.dump_folder,
        }
        if not dims.pp_enabled:
            return [spec.parallelize_fn(copy.deepcopy(self.whole), **arguments)], None
        schedule, modules, _, _ = spec.pipelining_fn(
            self.whole,
            **arguments,
            device=torch.device("meta"),
            model_config=spec.model,
            parallelize_fn=spec.parallelize_fn,
            loss_fn=None,
        )
        return modules, schedule


@contextlib.contextmanager
def _refusals() -> Generator[None]:
    """TorchTitan's refusals as the user's mistakes that they are."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"override.imports cannot be imported here: {error}.") from error
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"TorchTitan refuses this model on these ranks: {error}") from error


def _coordinates(dims: ParallelDims) -> dict[str, int]:
    def index(axis: str) -> int:
        mesh = dims.get_optional_mesh(axis, include_singleton_axes=True)
        assert mesh is not None
        return mesh.get_local_rank()

    # Not every SPMD backend has an axis dp_shard, but all have the batch axis, dp_replicate * dp_shard.
    replicate, shard = divmod(index("batch"), dims.dp_shard)
    dense = {"pp": index("pp"), "dp_replicate": replicate, "dp_shard": shard, "cp": index("cp"), "tp": index("tp")}
    return dense | {"efsdp": index("efsdp"), "ep": index("ep")}


# Parameters of a part -------------------------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered_numel(parameter: torch.Tensor) -> int:
    """Elements of a parameter on this rank while FSDP has gathered it: tensor and expert parallelism still shard it."""
    shape = list(parameter.shape)
    for axis in ("tp", "ep"):
        if (dim := sharded_dim(parameter, axis)) is not None:
            shape[dim] = -(-shape[dim] // axis_size(parameter, axis))
    return torch.Size(shape).numel()


def sharded_dim(parameter: torch.Tensor, axis: str) -> int | None:
    """The dimension of a parameter that is cut along a mesh axis; None if it is not."""
    if not isinstance(parameter, DTensor):
        return None
    placements = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
    return getattr(placements.get(axis), "dim", None)  # which every way of sharding has, and replication has not


def axis_size(parameter: torch.Tensor, axis: str) -> int:
    """Ranks along a mesh axis that a parameter is cut along."""
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh[axis].size()


def fsdp_units(module: torch.nn.Module) -> Iterator[tuple[str, list[torch.nn.Parameter]]]:
    """Name and parameters of every module that FSDP gathers and reshards as one; a tied parameter once."""
    units = {name: unit for name, unit in module.named_modules() if isinstance(unit, FSDPModule)}
    owner: dict[torch.nn.Parameter, str] = {}
    for name, unit in units.items():  # parents come before their children, which are what gathers a parameter
        owner.update(dict.fromkeys(unit.parameters(), name))
    for name in units:
        if parameters := [parameter for parameter, owned_by in owner.items() if owned_by == name]:
            yield name, parameters


def is_short(parameter: torch.Tensor) -> bool:
    """Whether a parameter has fewer rows than ranks to share them, so that some hold nothing but FSDP2's padding."""
    if not isinstance(parameter, DTensor):
        return False
    ranks: dict[int, int] = {}
    for axis in parameter.device_mesh.mesh_dim_names or ():
        if (dim := sharded_dim(parameter, axis)) is not None:
            ranks[dim] = ranks.get(dim, 1) * axis_size(parameter, axis)
    return any(parameter.shape[dim] < shared for dim, shared in ranks.items())
