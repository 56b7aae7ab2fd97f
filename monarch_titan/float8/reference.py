"""The operations in plain torch: what they mean. Every other implementation gives the same bytes.

Slow, and short enough to check by reading. Arguments are taken for valid; ``ops`` checks them. All arithmetic is fp32,
rounded after each step and never fused, so that it can be repeated to the bit anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from monarch_titan.float8.format import BLOCK, SMALLEST_SCALE, Format, Layout, flat_numel, round_up

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FNUZ_DTYPES = {"e4m3": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2fnuz}

NEGATIVE_ZERO = 0x80
"""In OCP; in FNUZ the same byte is NaN."""


def encode(values: torch.Tensor, format: Format) -> torch.Tensor:
    """Codes, uint8, of fp32 values within the element's range: rounded to nearest, ties to even."""
    codes = values.to(DTYPES[format.element]).view(torch.uint8)
    return codes.masked_fill(codes == NEGATIVE_ZERO, 0)


def decode(codes: torch.Tensor, format: Format) -> torch.Tensor:
    """The fp32 values of codes."""
    return codes.view(DTYPES[format.element]).float()


def encode_fnuz(values: torch.Tensor, format: Format) -> torch.Tensor:
    """The same codes as :func:`encode`, made the way gfx942 must: each is that of half the value in FNUZ."""
    codes = (values * 0.5).to(FNUZ_DTYPES[format.element]).view(torch.uint8)
    return codes.masked_fill(codes == NEGATIVE_ZERO, 0)


def decode_fnuz(codes: torch.Tensor, format: Format) -> torch.Tensor:
    """The same values as :func:`decode`, made the way gfx942 must, for the codes that a wire may hold."""
    return codes.view(FNUZ_DTYPES[format.element]).float() * 2.0


def quantize_blocks(values: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, uint8 (blocks, 128), and scales, fp32 (blocks,), of fp32 values (blocks, 128)."""
    amax = values.abs().amax(dim=1)
    finite = amax.isfinite()
    # By a tensor: torch may replace the division by a number with a multiplication, which rounds differently.
    scales = (amax / torch.full_like(amax, format.max)).clamp(min=SMALLEST_SCALE)
    if format.scale == "ue8m0":
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # up to a power of two
    scales = scales.where(amax > 0, 1.0).where(finite, torch.nan)
    scaled = (values * (torch.ones_like(scales) / scales).unsqueeze(1)).clamp(-format.max, format.max)
    return encode(scaled.where(finite.unsqueeze(1), 0.0), format), scales


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor, format: Format) -> torch.Tensor:
    """Values, fp32 (blocks, 128); all NaN in a block whose scale is NaN."""
    return decode(codes, format) * scales.unsqueeze(1)


def scales_to_bytes(scales: torch.Tensor, format: Format) -> torch.Tensor:
    """(blocks, 4 or 1), uint8."""
    if format.scale == "fp32":
        return scales.view(torch.uint8).view(-1, 4)
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return exponents.masked_fill(scales.isnan(), 0xFF).unsqueeze(1)


def bytes_to_scales(raw: torch.Tensor, format: Format) -> torch.Tensor:
    """The inverse of :func:`scales_to_bytes`."""
    if format.scale == "fp32":
        return raw.clone().view(torch.float32).flatten()  # a copy: raw may start anywhere
    scales = (raw.int() << 23).view(torch.float32)
    return scales.masked_fill(raw == 0xFF, torch.nan).flatten()


def write_segments(codes: torch.Tensor, scales: torch.Tensor, segments: int, format: Format) -> torch.Tensor:
    """A wire buffer, uint8 (segments, stride), of the blocks of all segments in order."""
    blocks = len(codes) // segments
    parts = [codes.view(segments, -1), scales_to_bytes(scales, format).reshape(segments, -1)]
    used = blocks * format.block_bytes
    return F.pad(torch.cat(parts, dim=1), (0, format.stride(blocks) - used))


def read_segments(wire: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of :func:`write_segments`."""
    blocks = wire.shape[1] // format.block_bytes
    scales = wire[:, blocks * BLOCK : blocks * format.block_bytes]
    codes = wire[:, : blocks * BLOCK].reshape(-1, BLOCK)
    return codes, bytes_to_scales(scales.reshape(len(codes), format.block_bytes - BLOCK), format)


def split(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """fp32 values (blocks, 128) of all segments, with zeros where the layout has no element."""
    rows = F.pad(flat.float(), (0, layout.segments * layout.segment - layout.numel))
    rows = rows.view(layout.segments, layout.segment)
    return F.pad(rows, (0, layout.blocks * BLOCK - layout.segment)).view(-1, BLOCK)


def join(blocks: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The inverse of :func:`split`: fp32 (numel,)."""
    rows = blocks.view(layout.segments, layout.blocks * BLOCK)[:, : layout.segment]
    return rows.reshape(-1)[: layout.numel]


def quantize_pack(x: torch.Tensor, segments: int, format: Format) -> torch.Tensor:
    """A wire buffer, uint8 (segments, stride), of a tensor of any shape."""
    layout = Layout(format=format, numel=x.numel(), segments=segments)
    return write_segments(*quantize_blocks(split(x.flatten(), layout), format), segments, format)


def quantize_pack_ef(x: torch.Tensor, residual: torch.Tensor, segments: int, format: Format) -> torch.Tensor:
    """The same with error feedback: of ``x + residual``; what the wire does not hold of it becomes the residual.

    The residual of a block that is not finite becomes 0: nobody knows what was lost, and the block itself is poison.
    """
    layout = Layout(format=format, numel=x.numel(), segments=segments)
    wanted = split(x.flatten().float() + residual.flatten(), layout)
    codes, scales = quantize_blocks(wanted, format)
    lost = (wanted - dequantize_blocks(codes, scales, format)).where(scales.isfinite().unsqueeze(1), 0.0)
    residual.copy_(join(lost, layout).view_as(residual))
    return write_segments(codes, scales, segments, format)


def pseudograd_pack(
    global_params: Sequence[torch.Tensor],
    local_params: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    segments: int,
    format: Format,
) -> torch.Tensor:
    """One wire buffer of what many parameters moved, global - local; each starts a block of its own (``offsets``)."""
    numels = [tensor.numel() for tensor in global_params]
    device = global_params[0].device if global_params else None
    moved = torch.zeros(flat_numel(numels, segments), device=device)
    end = 0
    for before, after in zip(global_params, local_params, strict=True):
        moved[end : end + before.numel()] = before.flatten().float() - after.flatten().float()
        end += round_up(before.numel(), BLOCK)
    if residual is None:
        return quantize_pack(moved, segments, format)
    return quantize_pack_ef(moved, residual, segments, format)


def reduce_segments(wire: torch.Tensor, numel: int, format: Format) -> torch.Tensor:
    """The sum, fp32 (numel,), of one segment from each rank, uint8 (ranks, stride), added in the order of ranks."""
    return reduce_blocks(wire, format).flatten()[:numel]


def reduce_requant(wire: torch.Tensor, format: Format) -> torch.Tensor:
    """The same sum as a segment again, uint8 (stride,)."""
    return write_segments(*quantize_blocks(reduce_blocks(wire, format), format), 1, format).flatten()


def reduce_blocks(wire: torch.Tensor, format: Format) -> torch.Tensor:
    """The sum as blocks, fp32 (blocks, 128)."""
    total = torch.zeros(wire.shape[1] // format.block_bytes, BLOCK, device=wire.device)
    for segment in wire:
        total = total + dequantize_blocks(*read_segments(segment.unsqueeze(0), format), format)
    return total


def unpack(wire: torch.Tensor, numel: int, dtype: torch.dtype, format: Format) -> torch.Tensor:
    """The flat tensor, fp32 or bf16 (numel,), of a wire buffer."""
    layout = Layout(format=format, numel=numel, segments=len(wire))
    return join(dequantize_blocks(*read_segments(wire, format), format), layout).to(dtype)


def quantize_rows(x: torch.Tensor, format: Format) -> torch.Tensor:
    """Rows, uint8 (rows, columns + columns / 32): each its codes, then its fp32 scales."""
    rows, columns = x.shape
    codes, scales = quantize_blocks(x.float().reshape(-1, BLOCK), format)
    parts = [codes.view(rows, columns), scales_to_bytes(scales, format).reshape(rows, columns // 32)]
    return torch.cat(parts, dim=1)


def dequantize_rows(raw: torch.Tensor, dtype: torch.dtype, format: Format) -> torch.Tensor:
    """The inverse: (rows, columns), fp32 or bf16."""
    rows, columns = raw.shape[0], raw.shape[1] // 33 * 32
    scales = bytes_to_scales(raw[:, columns:].reshape(-1, 4), format)
    values = dequantize_blocks(raw[:, :columns].reshape(-1, BLOCK), scales, format)
    return values.view(rows, columns).to(dtype)
