// dequantize_rows: the rows of quantize_rows -> tokens.
//
// In:    rows, uint8 [rows, columns + columns / 32].
// Out:   out, f32 or bf16 [rows, columns].
// Lanes: 8 a block, 16 elements each; 32 blocks a workgroup. Rows start at multiples of 4 bytes, which is enough for
//        accesses of 16.
// Bytes: an element: 5.03 to f32, 3.03 to bf16.
// VGPRs: at most 64, for 8 waves a SIMD; no scratch, no spills.
// Share of the limit: CPU in README.md; GPU not measured.
#include "block.h"

template <class T, class E>
struct DequantizeRows {
    const uint8_t* rows;
    T* out;
    uint32_t row_blocks;
    uint32_t blocks;  // of all rows

    MT_METHOD void run(uint32_t block) const {
        const uint32_t row = block / row_blocks, at = block - row * row_blocks;
        const uint8_t* start = rows + row * (uint64_t(row_blocks) * (kBlock + 4));
        const float scale = read_scale(start + uint64_t(row_blocks) * kBlock, at, false);
        float values[kElements];
        dequantize<E>(load_codes(start + uint64_t(at) * kBlock), scale, values);
        store(out + uint64_t(block) * kBlock, kBlock, values);
    }
};

MT_KERNEL(dequantize_rows_f32_e4m3, DequantizeRows<float, E4M3>)
MT_KERNEL(dequantize_rows_f32_e5m2, DequantizeRows<float, E5M2>)
MT_KERNEL(dequantize_rows_bf16_e4m3, DequantizeRows<Bf16, E4M3>)
MT_KERNEL(dequantize_rows_bf16_e5m2, DequantizeRows<Bf16, E5M2>)
