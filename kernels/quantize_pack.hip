// quantize_pack: a tensor of any shape -> a wire buffer of segments (reduce-scatter, all-reduce; all-gather with one).
//
// In:    x, f32 or bf16 [numel], contiguous; segment w holds x[w * segment_numel ...] (format.Layout).
// Out:   wire, uint8 [segments, stride]: codes, scales, zeros. Every byte is written.
// Lanes: 8 a block, 16 elements each; 32 blocks a workgroup. One pass, no shared memory; amax by three DPP maxima.
//        A block whose elements do not start at 16 bytes, or that is cut off, is read element by element.
// Bytes: an element, with fp32 scales: 5.03 from f32, 3.03 from bf16.
// VGPRs: at most 72, for 7 waves a SIMD; no scratch, no spills.
// Share of the limit: CPU in README.md; GPU not measured.
#include "block.h"

template <class T, class E>
struct QuantizePack {
    const T* x;
    uint8_t* wire;
    uint64_t numel;
    uint64_t segment_numel;
    Segment segment;
    uint32_t blocks;  // of all segments

    MT_METHOD void run(uint32_t block) const {
        const Place place = find_block(block, segment, segment_numel, numel);
        float values[kElements];
        load(x + place.start, place.count, values);
        const float scale = block_scale<E>(values, segment.ue8m0);
        const Codes codes = quantize<E>(values, scale);
        write_block(wire + place.segment * segment.stride(), segment, place.block, codes, scale);
    }
};

MT_KERNEL(quantize_pack_f32_e4m3, QuantizePack<float, E4M3>)
MT_KERNEL(quantize_pack_f32_e5m2, QuantizePack<float, E5M2>)
MT_KERNEL(quantize_pack_bf16_e4m3, QuantizePack<Bf16, E4M3>)
MT_KERNEL(quantize_pack_bf16_e5m2, QuantizePack<Bf16, E5M2>)
