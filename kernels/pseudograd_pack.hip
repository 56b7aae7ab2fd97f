// pseudograd_pack: what all parameters of a fragment moved, global - local -> one wire buffer (DiLoCo).
//
// In:    spans [count], in device memory and in the order of first_block: a parameter's two copies, f32 or bf16, and
//        where it starts. Every parameter starts a block, so none is shared; residual, f32 [blocks * 128], or null.
// Out:   wire, uint8 [segments, stride]; residual as in quantize_pack_ef.
// Lanes: 8 a block, 16 elements each; 32 blocks a workgroup. Each block finds its span by bisection, which 304 spans
//        make 9 steps that the whole team takes alike.
// Bytes: an element, with fp32 scales: 9.03 from f32, 5.03 from bf16; with a residual 8 more.
// VGPRs: at most 104, for 4 waves a SIMD; no scratch, no spills.
// Share of the limit: CPU in README.md; GPU not measured.
#include "block.h"

struct Span {
    const void* global;
    const void* local;
    uint64_t numel;
    uint32_t first_block;
    uint32_t bf16;  // else f32
};

template <class T>
MT_DEVICE void load_moved(const Span& span, uint64_t start, float (&values)[kElements]) {
    const uint64_t count = span.numel > start ? span.numel - start : 0;
    float local[kElements];
    load(static_cast<const T*>(span.global) + start, count, values);
    load(static_cast<const T*>(span.local) + start, count, local);
    MT_UNROLL for (uint32_t i = 0; i < kElements; i++) values[i] -= local[i];
}

template <class E>
struct PseudogradPack {
    const Span* spans;
    float* residual;
    uint8_t* wire;
    Segment segment;
    uint32_t count;
    uint32_t blocks;

    // The last span that starts at the block or before it.
    MT_METHOD const Span& find(uint32_t block) const {
        uint32_t low = 0, high = count;
        while (high - low > 1) {
            const uint32_t middle = (low + high) / 2;
            if (spans[middle].first_block <= block) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return spans[low];
    }

    MT_METHOD void run(uint32_t block) const {
        const Span& span = find(block);
        const uint64_t start = uint64_t(block - span.first_block) * kBlock;
        float values[kElements], scale;
        if (span.bf16) {
            load_moved<Bf16>(span, start, values);
        } else {
            load_moved<float>(span, start, values);
        }
        Codes codes;
        if (residual) {
            codes = quantize_with_feedback<E>(values, residual + uint64_t(block) * kBlock, kBlock, segment.ue8m0, scale);
        } else {
            scale = block_scale<E>(values, segment.ue8m0);
            codes = quantize<E>(values, scale);
        }
        const uint32_t to = block / segment.blocks;
        write_block(wire + to * segment.stride(), segment, block - to * segment.blocks, codes, scale);
    }
};

MT_KERNEL(pseudograd_pack_e4m3, PseudogradPack<E4M3>)
MT_KERNEL(pseudograd_pack_e5m2, PseudogradPack<E5M2>)
