// unpack: a wire buffer of segments -> the tensor (all-gather, the end of an all-reduce).
//
// In:    wire, uint8 [segments, stride].
// Out:   out, f32 or bf16 [numel]; code * scale rounded to f32, then for bf16 once more.
// Lanes: 8 a block, 16 elements each; 32 blocks a workgroup. A block that would not be stored at 16 bytes, or that is
//        cut off, is written element by element.
// Bytes: an element, with fp32 scales: 5.03 to f32, 3.03 to bf16.
// VGPRs: at most 96, for 5 waves a SIMD; no scratch, no spills.
// Share of the limit: CPU in README.md; GPU not measured.
#include "block.h"

template <class T, class E>
struct Unpack {
    const uint8_t* wire;
    T* out;
    uint64_t numel;
    uint64_t segment_numel;
    Segment segment;
    uint32_t blocks;  // of all segments

    MT_METHOD void run(uint32_t block) const {
        const Place place = find_block(block, segment, segment_numel, numel);
        float values[kElements];
        read_block<E>(wire + place.segment * segment.stride(), segment, place.block, values);
        store(out + place.start, place.count, values);
    }
};

MT_KERNEL(unpack_f32_e4m3, Unpack<float, E4M3>)
MT_KERNEL(unpack_f32_e5m2, Unpack<float, E5M2>)
MT_KERNEL(unpack_bf16_e4m3, Unpack<Bf16, E4M3>)
MT_KERNEL(unpack_bf16_e5m2, Unpack<Bf16, E5M2>)
