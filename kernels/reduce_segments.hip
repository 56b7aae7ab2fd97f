// reduce_segments: one segment from each rank -> their sum in fp32 (FSDP's reduce-scatter).
//
// In:    wire, uint8 [ranks, stride].
// Out:   out, f32 [numel]. Added in the order of ranks, each product rounded, nothing fused: the same bits everywhere.
// Lanes: 8 a block, 16 elements each, which stay in registers over all ranks; 32 blocks a workgroup.
// Bytes: an element, with fp32 scales: 1.031 a rank + 4.
// VGPRs: at most 80, for 6 waves a SIMD; no scratch, no spills.
// Share of the limit: CPU in README.md; GPU not measured.
#include "block.h"

template <class E>
struct ReduceSegments {
    const uint8_t* wire;
    float* out;
    uint64_t numel;
    Segment segment;
    uint32_t ranks;
    uint32_t blocks;  // of one segment

    MT_METHOD void run(uint32_t block) const {
        float total[kElements];
        sum_ranks<E>(wire, ranks, segment, block, total);
        const uint64_t start = uint64_t(block) * kBlock;
        store(out + start, numel - start, total);
    }
};

MT_KERNEL(reduce_segments_e4m3, ReduceSegments<E4M3>)
MT_KERNEL(reduce_segments_e5m2, ReduceSegments<E5M2>)
