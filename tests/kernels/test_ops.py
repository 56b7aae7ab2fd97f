"""The torch ops: any input that fits gives the reference's bytes, any other an error that names the argument."""

from __future__ import annotations

import logging

import pytest
import torch

from monarch_titan.float8 import checks, cpu, ops, reference
from monarch_titan.float8.format import Format, flat_numel, offsets
from tests.kernels.inputs import LENGTHS, same, spread

E4M3 = Format()
X = spread(300, seed=1)
WIRE = reference.quantize_pack(X, 2, E4M3)
ROWS = reference.quantize_rows(spread(512, seed=2).view(2, 256), E4M3)

VIEWS = {
    "(2, 3, 4)": spread(24, seed=0).view(2, 3, 4),
    "scalar": torch.tensor(3.0),
    "transposed": spread(600, seed=0).view(20, 30).T,
    "strided": spread(4097, seed=0)[::3],
    "odd offset": spread(4097, seed=0)[1:],
    "odd offset of bf16": spread(4097, seed=0, dtype=torch.bfloat16)[3:],
    "expanded": spread(7, seed=0).view(7, 1).expand(7, 300),
    "channels last": spread(2 * 3 * 8 * 8, seed=0).view(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "empty": torch.empty(3, 0, 5),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("segments", [1, 3])
def test_any_shape_and_strides(name, segments):
    x = VIEWS[name]
    wire = ops.quantize_pack(x, segments)
    same(wire, reference.quantize_pack(x.contiguous(), segments, E4M3))
    same(ops.unpack(wire, x.numel()), reference.unpack(wire, x.numel(), torch.float32, E4M3))
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = noise.clone(), noise.clone()
    same(ops.quantize_pack_ef(x, ours, segments), reference.quantize_pack_ef(x.contiguous(), theirs, segments, E4M3))
    same(ours, theirs)
    moved = reference.pseudograd_pack([x.contiguous()], [x.contiguous() * 2], None, segments, E4M3)
    same(ops.pseudograd_pack([x], [x * 2], None, segments), moved)


def test_residual_may_be_strided():
    ours, theirs = torch.zeros(600)[::2], torch.zeros(300)
    ops.quantize_pack_ef(X, ours)
    reference.quantize_pack_ef(X, theirs, 1, E4M3)
    same(ours.contiguous(), theirs)


def test_wires_and_rows_may_lie_anywhere():
    for shift in (1, 2, 3):
        moved = torch.empty(WIRE.numel() + shift, dtype=torch.uint8)[shift:].view(WIRE.shape).copy_(WIRE)
        same(ops.unpack(moved, 300), ops.unpack(WIRE, 300))
        same(ops.reduce_segments(moved, 150), reference.reduce_segments(WIRE, 150, E4M3))
        same(ops.reduce_requant(moved), reference.reduce_requant(WIRE, E4M3))
    wide = torch.stack([ROWS, ROWS], dim=2)
    same(ops.dequantize_rows(wide[:, :, 1]), ops.dequantize_rows(ROWS))
    square = spread(256 * 256, seed=4).view(256, 256)
    same(ops.quantize_rows(square.T), reference.quantize_rows(square.T.contiguous(), E4M3))


@pytest.mark.parametrize("strided", [False, True])
def test_results_may_be_written_into_what_the_caller_has(strided):
    def room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(*shape, 2, dtype=dtype)[..., 0] if strided else torch.ones(shape, dtype=dtype)

    wire = room(tuple(WIRE.shape), torch.uint8)
    ops.quantize_pack_out(X, wire, 2)
    same(wire.contiguous(), WIRE)
    ours, theirs = torch.ones(300), torch.ones(300)
    ops.quantize_pack_ef_out(X, ours, wire, 2)
    same(wire.contiguous(), reference.quantize_pack_ef(X, theirs, 2, E4M3))
    same(ours, theirs)
    params = ([X, X[:5]], [X * 2, X[:5]])
    moved = room(tuple(WIRE.shape), torch.uint8)
    ours, theirs = torch.ones(512), torch.ones(512)
    ops.pseudograd_pack_out(*params, ours, moved, 2)
    same(moved.contiguous(), reference.pseudograd_pack(*params, theirs, 2, E4M3))
    same(ours, theirs)
    ops.pseudograd_pack_out(*params, None, moved, 2)
    same(moved.contiguous(), reference.pseudograd_pack(*params, None, 2, E4M3))
    segment = room(tuple(WIRE.shape[1:]), torch.uint8)
    ops.reduce_requant_out(WIRE, segment)
    same(segment.contiguous(), reference.reduce_requant(WIRE, E4M3))
    rows = room(tuple(ROWS.shape), torch.uint8)
    ops.quantize_rows_out(spread(512, seed=2).view(2, 256), rows)
    same(rows.contiguous(), ROWS)
    matrix = room((2, 256), torch.bfloat16)
    ops.dequantize_rows_out(ROWS, matrix)
    same(matrix.contiguous(), reference.dequantize_rows(ROWS, torch.bfloat16, E4M3))
    total = room((10, 15), torch.float32)
    ops.reduce_segments_out(WIRE, total)
    same(total.flatten(), reference.reduce_segments(WIRE, 150, E4M3))
    back = room((30, 10), torch.bfloat16)
    ops.unpack_out(WIRE, back)
    same(back.flatten(), reference.unpack(WIRE, 300, torch.bfloat16, E4M3))


def test_parameters_are_found_where_offsets_say():
    before = [spread(numel, seed=numel) for numel in LENGTHS]
    after = [torch.zeros(numel) for numel in LENGTHS]
    total = flat_numel(LENGTHS, segments=3)
    flat = ops.unpack(ops.pseudograd_pack(before, after, None, 3), total)
    for start, tensor in zip(offsets(LENGTHS), before, strict=True):
        alone = ops.unpack(ops.quantize_pack(tensor), tensor.numel())
        same(flat[start : start + tensor.numel()], alone)


CALLS = {
    "quantize_pack": (X, 2, "e5m2", "ue8m0"),
    "quantize_pack_ef": (X, torch.zeros(300), 3),
    "pseudograd_pack": ([X, X[:5].bfloat16()], [X * 2, X[:5].bfloat16()], torch.zeros(512), 2),
    "reduce_segments": (WIRE, 150),
    "reduce_requant": (WIRE,),
    "unpack": (WIRE, 300, torch.bfloat16),
    "quantize_pack_out": (X, torch.empty_like(WIRE), 2),
    "reduce_segments_out": (WIRE, torch.empty(10, 15)),
    "unpack_out": (WIRE, torch.empty(30, 10, dtype=torch.bfloat16)),
    "quantize_pack_ef_out": (X, torch.zeros(300), torch.empty_like(WIRE), 2),
    "pseudograd_pack_out": ([X], [X * 2], torch.zeros(512), torch.empty_like(WIRE), 2),
    "reduce_requant_out": (WIRE, torch.empty_like(WIRE[0])),
    "quantize_rows_out": (X[:256].view(2, 128), torch.empty(2, 132, dtype=torch.uint8), "e5m2"),
    "dequantize_rows_out": (ROWS, torch.empty(2, 256)),
    "quantize_rows": (X[:256].view(2, 128), "e5m2"),
    "dequantize_rows": (ROWS, torch.float32),
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_finds_nothing_wrong(name):
    """Schema, aliasing, fake tensors and compilation, static and dynamic: torch's own checks."""
    torch.library.opcheck(getattr(ops, name), CALLS[name])


@pytest.mark.parametrize("name", [name for name in CALLS if not name.endswith("_out")])
def test_shapes_are_known_without_data(name):
    def to_meta(argument):
        if isinstance(argument, list):
            return [tensor.to("meta") for tensor in argument]
        return argument.to("meta") if isinstance(argument, torch.Tensor) else argument

    real = getattr(torch.ops.monarch_titan, name)(*CALLS[name])
    meta = getattr(torch.ops.monarch_titan, name)(*map(to_meta, CALLS[name]))
    assert (meta.shape, meta.dtype, meta.device.type) == (real.shape, real.dtype, "meta")


def test_compiles():
    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return ops.unpack(ops.quantize_pack(x * 2, 3), x.numel()) + 1

    compiled = torch.compile(there_and_back, backend="aot_eager", fullgraph=True, dynamic=True)
    for numel in (4097, 128, 5):
        same(compiled(spread(numel, seed=1)), there_and_back(spread(numel, seed=1)))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ops.quantize_pack(X.half()), "x must be float32 or bfloat16, got float16."),
        (lambda: ops.quantize_pack(X, 0), "segments must be at least 1, got 0."),
        (lambda: ops.quantize_pack(X, 1, "e3m4"), "element must be one of e4m3, e5m2, got 'e3m4'."),
        (lambda: ops.quantize_pack(X, 1, "e4m3", "fp64"), "scale must be one of fp32, ue8m0, got 'fp64'."),
        (lambda: ops.quantize_pack_ef(X, X.double()), "residual must be float32, got float64."),
        (lambda: ops.quantize_pack_ef(X, X[1:]), "residual must have the shape of x, (300,), got (299,)."),
        (lambda: ops.pseudograd_pack([X], []), "local_params must be as many as global_params, 1, got 0."),
        (lambda: ops.pseudograd_pack([X], [X.bfloat16()]), "local_params[0] must be float32, got bfloat16."),
        (lambda: ops.pseudograd_pack([X, X], [X, X[1:]]), "local_params[1] must have the shape of global_params[1],"),
        (lambda: ops.pseudograd_pack([X], [X], X), "residual must have the shape (384,), got (300,)."),
        (lambda: ops.reduce_segments(WIRE, 1000), "wire must have the shape (ranks, 1056) for 1000 elements"),
        (lambda: ops.reduce_segments(WIRE.int(), 150), "wire must be uint8, got int32."),
        (lambda: ops.reduce_segments(WIRE, -1), "numel must not be negative, got -1."),
        (lambda: ops.reduce_requant(WIRE[:, 1:]), "wire must have the shape (ranks, stride), where"),
        (lambda: ops.unpack(WIRE, 3000), "wire must have the shape (segments, 1584) for 1500 elements a segment"),
        (lambda: ops.unpack(WIRE[:0], 0), "wire must have the shape (segments, 0)"),
        (lambda: ops.unpack(WIRE[0], 150), "wire must have the shape (segments, "),
        (lambda: ops.unpack(WIRE, 300, torch.float16), "dtype must be float32 or bfloat16, got float16."),
        (lambda: ops.quantize_pack_out(X, WIRE), "out must have the shape (1, 400), got (2, 272)."),
        (lambda: ops.unpack_out(WIRE, X.half()), "out must be float32 or bfloat16, got float16."),
        (lambda: ops.reduce_segments_out(WIRE, X.bfloat16()), "out must be float32, got bfloat16."),
        (lambda: ops.quantize_pack_ef_out(X, X.clone(), WIRE), "out must have the shape (1, 400), got (2, 272)."),
        (lambda: ops.pseudograd_pack_out([X], [X], None, WIRE), "out must have the shape (1, 400), got (2, 272)."),
        (lambda: ops.reduce_requant_out(WIRE, WIRE), "out must have the shape (272,), got (2, 272)."),
        (lambda: ops.quantize_rows_out(X[:256].view(2, 128), WIRE), "out must have the shape (2, 132), got (2, 272)."),
        (lambda: ops.dequantize_rows_out(ROWS, X), "out must have the shape (2, 256), got (300,)."),
        (lambda: ops.quantize_rows(X.view(3, 100)), "x must have the shape (rows, a multiple of 128), got (3, 100)."),
        (lambda: ops.dequantize_rows(ROWS[:, 1:]), "rows must have the shape (rows, a multiple of 132), got (2, 263)."),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(message)


def test_all_arguments_are_on_one_device_that_has_kernels():
    """Through an op, torch would take tensors without data for a question about shapes."""
    nowhere = X.to("meta")
    assert checks.check_devices({"x": X, "residual": X}) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"^residual must be on the device of x, cpu, got meta\.$"):
        checks.check_devices({"x": X, "residual": nowhere})
    with pytest.raises(ValueError, match=r"^x must be on a CPU, or a GPU of CUDA or ROCm, got meta\.$"):
        checks.check_devices({"x": nowhere, "residual": nowhere})


def test_which_implementation_runs_is_logged_once(caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "none.so")
    ops.implementation.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            wires = [ops.quantize_pack(X, 2) for _ in range(3)]
    finally:
        ops.implementation.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(tmp_path) in caplog.text
    same(wires[0], WIRE)
