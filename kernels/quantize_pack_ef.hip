// quantize_pack_ef: quantize_pack with error feedback (DiLoCo's outer gradients).
//
// In:    x, f32 or bf16 [numel]; residual, f32 [numel]: what earlier rounds lost, added before.
// Out:   wire as of quantize_pack; residual, in place: (x + residual) - what the wire holds; 0 in a poisoned block.
// Lanes: as quantize_pack.
// Bytes: an element, with fp32 scales: 13.03 from f32, 11.03 from bf16.
// VGPRs: at most 96, for 5 waves a SIMD; no scratch, no spills.
// Share of the limit: CPU in README.md; GPU not measured.
#include "block.h"

template <class T, class E>
struct QuantizePackEf {
    const T* x;
    float* residual;
    uint8_t* wire;
    uint64_t numel;
    uint64_t segment_numel;
    Segment segment;
    uint32_t blocks;

    MT_METHOD void run(uint32_t block) const {
        const Place place = find_block(block, segment, segment_numel, numel);
        float values[kElements], scale;
        load(x + place.start, place.count, values);
        const Codes codes =
            quantize_with_feedback<E>(values, residual + place.start, place.count, segment.ue8m0, scale);
        write_block(wire + place.segment * segment.stride(), segment, place.block, codes, scale);
    }
};

MT_KERNEL(quantize_pack_ef_f32_e4m3, QuantizePackEf<float, E4M3>)
MT_KERNEL(quantize_pack_ef_f32_e5m2, QuantizePackEf<float, E5M2>)
MT_KERNEL(quantize_pack_ef_bf16_e4m3, QuantizePackEf<Bf16, E4M3>)
MT_KERNEL(quantize_pack_ef_bf16_e5m2, QuantizePackEf<Bf16, E5M2>)
