// quantize_rows: tokens -> rows of codes and fp32 scales that travel as one (expert parallelism's dispatch).
//
// In:    x, f32 or bf16 [rows, columns], contiguous; columns divide by 128.
// Out:   out, uint8 [rows, columns + columns / 32]: a row's codes, then its scales.
// Lanes: 8 a block, 16 elements each; 32 blocks a workgroup. Rows start at multiples of 4 bytes, which is enough for
//        accesses of 16.
// Bytes: an element: 5.03 from f32, 3.03 from bf16.
// VGPRs: at most 64, for 8 waves a SIMD; no scratch, no spills.
// Share of the limit: CPU in README.md; GPU not measured.
#include "block.h"

template <class T, class E>
struct QuantizeRows {
    const T* x;
    uint8_t* out;
    uint32_t row_blocks;
    uint32_t blocks;  // of all rows

    MT_METHOD void run(uint32_t block) const {
        const uint32_t row = block / row_blocks, at = block - row * row_blocks;
        float values[kElements];
        load(x + uint64_t(block) * kBlock, kBlock, values);
        const float scale = block_scale<E>(values, false);
        uint8_t* start = out + row * (uint64_t(row_blocks) * (kBlock + 4));
        store_codes(start + uint64_t(at) * kBlock, quantize<E>(values, scale));
        if (lane() == 0) write_scale(start + uint64_t(row_blocks) * kBlock, at, false, scale);
    }
};

MT_KERNEL(quantize_rows_f32_e4m3, QuantizeRows<float, E4M3>)
MT_KERNEL(quantize_rows_f32_e5m2, QuantizeRows<float, E5M2>)
MT_KERNEL(quantize_rows_bf16_e4m3, QuantizeRows<Bf16, E4M3>)
MT_KERNEL(quantize_rows_bf16_e5m2, QuantizeRows<Bf16, E5M2>)
