// reduce_requant: one segment from each rank -> their sum as a segment (the middle of an all-reduce).
//
// In:    wire, uint8 [ranks, stride].
// Out:   out, uint8 [stride]: the sum of reduce_segments, quantized as by quantize_pack.
// Lanes: 8 a block, 16 elements each, in registers throughout; 32 blocks a workgroup.
// Bytes: an element, with fp32 scales: 1.031 a rank + 1.031.
// VGPRs: at most 64, for 8 waves a SIMD; no scratch, no spills.
// Share of the limit: CPU in README.md; GPU not measured.
#include "block.h"

template <class E>
struct ReduceRequant {
    const uint8_t* wire;
    uint8_t* out;
    Segment segment;
    uint32_t ranks;
    uint32_t blocks;  // of one segment

    MT_METHOD void run(uint32_t block) const {
        float total[kElements];
        sum_ranks<E>(wire, ranks, segment, block, total);
        const float scale = block_scale<E>(total, segment.ue8m0);
        write_block(out, segment, block, quantize<E>(total, scale), scale);
    }
};

MT_KERNEL(reduce_requant_e4m3, ReduceRequant<E4M3>)
MT_KERNEL(reduce_requant_e5m2, ReduceRequant<E5M2>)
