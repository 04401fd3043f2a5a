"""What the kernels share: csrc/blockwise/quantize_block.h and csrc/common/rows.h, over tiles of [blocks, 128]."""

import triton
import triton.language as tl

from ltx_kernels.blockwise.triton.numbers import (
    INFINITY_BITS,
    QUIET_NAN_BITS,
    encode_e4m3,
    magnitude_bits,
    to_float32,
)

BLOCK = tl.constexpr(128)
ROWS = tl.constexpr(16)  # of a tile of one block of columns
SMALLEST_AMAX_BITS = tl.constexpr((127 - 117) << 23)  # 2^-117
FP8_MAX = tl.constexpr(448.0)


def tiles(rows: int, hidden: int) -> int:
    """How many programs :func:`tile` serves."""
    return -(-rows // ROWS.value) * -(-hidden // BLOCK.value)


@triton.jit
def tile(rows, hidden):
    """This program's rows [ROWS, 1] and its block of columns."""
    program = tl.program_id(0)
    blocks = tl.cdiv(hidden, BLOCK)
    row = (program // blocks).to(rows.dtype) * ROWS + tl.arange(0, ROWS)[:, None]
    return row, (program % blocks).to(tl.int64)


@triton.jit
def chunk_of_row(chunk, BLOCKS: tl.constexpr):
    """The blocks [BLOCKS, 1] of a part of a row."""
    return chunk * BLOCKS + tl.arange(0, BLOCKS)[:, None].to(tl.int64)


@triton.jit
def columns_of(block):
    return block * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def row_offset(row, sizes, strides):
    """Where a row begins, by sizes and strides from ``launch.rows_of``."""
    offset = 0
    for dim in tl.static_range(len(sizes)):
        offset += (row % sizes[dim]).to(tl.int64) * strides[dim]
        row = row // sizes[dim]
    return offset + row.to(tl.int64) * strides[len(sizes)]


@triton.jit
def load(pointers, mask):
    """fp32 values, 0 where the mask is off."""
    return to_float32(tl.load(pointers, mask, other=0.0))


@triton.jit
def reciprocal_rms(squares, hidden, eps: tl.constexpr):
    """1 / sqrt(squares / hidden + eps); NaN where the sum of squares is not finite."""
    rstd = tl.rsqrt(squares / hidden + eps)
    return tl.where(magnitude_bits(squares) < INFINITY_BITS, rstd, float("nan"))


@triton.jit
def quantize_block(v, amax_bits, scale_max):
    """Bytes and scale of a block v, or of several, whose amax_bits broadcast to v."""
    poisoned = amax_bits >= INFINITY_BITS
    amax_c = tl.maximum(amax_bits, SMALLEST_AMAX_BITS).to(tl.float32, bitcast=True)
    multiplier = tl.div_rn(scale_max, amax_c)
    scale_bits = tl.div_rn(amax_c, scale_max).to(tl.int32, bitcast=True)
    scale = tl.where(poisoned, QUIET_NAN_BITS, scale_bits).to(tl.float32, bitcast=True)
    return encode_e4m3(tl.where(poisoned, 0.0, v * multiplier)), scale


@triton.jit
def store_quantized(v, q, scales, row, block, rows, hidden):
    """Quantizes blocks v [n, 128]: block ``block`` of row ``row``, of which one is [n, 1] and the other a number.

    Rows past the last stand for the padding of the scales, which is 0.
    """
    column = columns_of(block)
    amax_bits = tl.max(magnitude_bits(v), axis=1, keep_dims=True)
    values, scale = quantize_block(v, amax_bits, FP8_MAX)
    tl.store(q + row.to(tl.int64) * hidden + column, values, (row < rows) & (column < hidden))
    padded_rows = (rows + 3) // 4 * 4
    places = scales + block * padded_rows + row
    tl.store(places, tl.where(row < rows, scale, 0.0), (row < padded_rows) & (block * BLOCK < hidden))
