// A block's way between elements in memory and its codes and scale on the wire (monarch_titan/float8/format.py).
#pragma once
#include "codes.h"

// Where a segment's parts lie: codes, then scales, then zeros up to a multiple of 16 bytes.
struct Segment {
    uint32_t blocks;
    uint32_t ue8m0;  // scales are one byte, else fp32

    MT_METHOD uint64_t scale_bytes() const { return ue8m0 ? 1 : 4; }
    MT_METHOD uint64_t stride() const { return (blocks * (kBlock + scale_bytes()) + 15) & ~uint64_t(15); }
};

MT_DEVICE uint32_t first_element() { return lane() * kElements; }

#if defined(MT_GPU)

template <class T>
MT_DEVICE bool is_aligned(const T* address) {
    return (uint64_t(address) & 15u) == 0;
}

// 16 bytes at a time: both addresses must be aligned.
MT_DEVICE void copy(void* to, const void* from, uint32_t bytes) {
#if defined(__CUDACC__)
    MT_UNROLL for (uint32_t i = 0; i < bytes / 16; i++) static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
#else
    __builtin_memcpy(__builtin_assume_aligned(to, 16), __builtin_assume_aligned(from, 16), bytes);
#endif
}

template <class T>
MT_DEVICE void load_all(const T* x, float (&values)[kElements]) {
    alignas(16) T raw[kElements];
    copy(raw, x, sizeof raw);
    MT_UNROLL for (uint32_t i = 0; i < kElements; i++) values[i] = to_float(raw[i]);
}

template <class T>
MT_DEVICE void store_all(T* x, const float (&values)[kElements]) {
    alignas(16) T raw[kElements];
    MT_UNROLL for (uint32_t i = 0; i < kElements; i++) from_float(values[i], raw[i]);
    copy(x, raw, sizeof raw);
}

#else

template <class T>
MT_DEVICE bool is_aligned(const T*) {
    return true;  // enough for a CPU
}

template <class T>
MT_DEVICE void load_all(const T* x, float (&values)[kElements]) {
    // 16 blocks ahead: a block takes so many instructions that the processor itself does not look beyond it.
    const uintptr_t ahead = uintptr_t(x) + 16 * kBlock * sizeof(T);
    for (uint32_t i = 0; i < kBlock * sizeof(T); i += 64) __builtin_prefetch(reinterpret_cast<const void*>(ahead + i));
    for (uint32_t i = 0; i < kElements; i++) values[i] = to_float(x[i]);
}

template <class T>
MT_DEVICE void store_all(T* x, const float (&values)[kElements]) {
    for (uint32_t i = 0; i < kElements; i++) from_float(values[i], x[i]);
}

#endif

// The lane's elements of a block at `x`, of which `count` exist (any number); the others are zero.
template <class T>
MT_DEVICE void load(const T* x, uint64_t count, float (&values)[kElements]) {
    if (count >= kBlock && is_aligned(x)) {
        load_all(x + first_element(), values);
    } else {
        MT_UNROLL for (uint32_t i = 0; i < kElements; i++) {
            const uint32_t at = first_element() + i;
            values[i] = at < count ? to_float(x[at]) : 0.0f;
        }
    }
}

template <class T>
MT_DEVICE void store(T* x, uint64_t count, const float (&values)[kElements]) {
    if (count >= kBlock && is_aligned(x)) {
        store_all(x + first_element(), values);
    } else {
        MT_UNROLL for (uint32_t i = 0; i < kElements; i++) {
            const uint32_t at = first_element() + i;
            if (at < count) from_float(values[i], x[at]);
        }
    }
}

// What the block's codes are multiplied with, NaN if an element is not finite. The same on all lanes of the team.
//
// amax / max <= scale, so no element times the inverse exceeds max by more than the roundings, which the codes' own
// rounding takes back: nothing needs to be clamped.
template <class E>
MT_DEVICE float block_scale(const float (&values)[kElements], bool ue8m0) {
    uint32_t amax = 0;  // of the bits without sign, which are in the order of the values; NaN is above all
    MT_UNROLL for (uint32_t i = 0; i < kElements; i++) {
        const uint32_t size = bit_cast<uint32_t>(values[i]) & 0x7fffffffu;
        amax = amax > size ? amax : size;
    }
    amax = team_max(amax);
    constexpr uint32_t smallest = 1u << 23;  // 2^-126, whose inverse is finite
    uint32_t bits = bit_cast<uint32_t>(bit_cast<float>(amax) / E::max);
    bits = bits < smallest ? smallest : bits;
    if (ue8m0) bits = (bits + 0x7fffffu) & 0x7f800000u;  // up to a power of two
    if (amax == 0) bits = 0x3f800000u;                   // 1
    if (amax >= 0x7f800000u) bits = 0x7fc00000u;         // NaN
    return bit_cast<float>(bits);
}

MT_DEVICE bool is_nan(float scale) { return (bit_cast<uint32_t>(scale) & 0x7fffffffu) > 0x7f800000u; }

template <class E>
MT_DEVICE Codes quantize(const float (&values)[kElements], float scale) {
    return encode<E>(values, kEncode / scale, !is_nan(scale));
}

template <class E>
MT_DEVICE void dequantize(const Codes& codes, float scale, float (&values)[kElements]) {
    decode<E>(codes, scale * kDecode, values);
}

// On a GPU an fp32 scale lies at a multiple of 4 bytes, as segments and rows start there. nvcc must be told.
template <class T>
MT_DEVICE T* as_word(T* address) {
#if defined(MT_GPU)
    return static_cast<T*>(__builtin_assume_aligned(address, 4));
#else
    return address;
#endif
}

MT_DEVICE void write_scale(uint8_t* scales, uint32_t block, bool ue8m0, float scale) {
    if (ue8m0) {
        scales[block] = is_nan(scale) ? uint8_t(0xff) : uint8_t(bit_cast<uint32_t>(scale) >> 23);
    } else {
        __builtin_memcpy(as_word(scales + uint64_t(block) * 4), &scale, 4);
    }
}

MT_DEVICE float read_scale(const uint8_t* scales, uint32_t block, bool ue8m0) {
    if (ue8m0) return bit_cast<float>(scales[block] == 0xff ? 0x7fc00000u : uint32_t(scales[block]) << 23);
    float scale;
    __builtin_memcpy(&scale, as_word(scales + uint64_t(block) * 4), 4);
    return scale;
}

#if defined(MT_GPU) && !defined(__CUDACC__)
// 16 bytes in one access, for which AMD's hardware wants no more than 4 bytes of alignment: rows have no more.
typedef uint32_t CodeWords __attribute__((vector_size(16), aligned(4), may_alias));
#endif

// The lane's codes of the block whose codes start at `from`.
MT_DEVICE Codes load_codes(const uint8_t* from) {
#if defined(__CUDACC__)
    const uint32_t* words = reinterpret_cast<const uint32_t*>(from + first_element());
    if (is_aligned(from)) return *reinterpret_cast<const Codes*>(words);
    return Codes{{words[0], words[1], words[2], words[3]}};  // of a row
#elif defined(MT_GPU)
    const CodeWords words = *reinterpret_cast<const CodeWords*>(from + first_element());
    return Codes{{words[0], words[1], words[2], words[3]}};
#else
    Codes codes;
    for (uint32_t i = 0; i < kElements; i++) codes.bytes[i] = from[i];
    return codes;
#endif
}

MT_DEVICE void store_codes(uint8_t* to, const Codes& codes) {
#if defined(__CUDACC__)
    uint32_t* words = reinterpret_cast<uint32_t*>(to + first_element());
    if (is_aligned(to)) {
        *reinterpret_cast<Codes*>(words) = codes;
    } else {
        MT_UNROLL for (uint32_t i = 0; i < kElements / 4; i++) words[i] = codes.words[i];
    }
#elif defined(MT_GPU)
    const CodeWords words = {codes.words[0], codes.words[1], codes.words[2], codes.words[3]};
    *reinterpret_cast<CodeWords*>(to + first_element()) = words;
#else
    for (uint32_t i = 0; i < kElements; i++) to[i] = codes.bytes[i];
#endif
}

// Writes one block of a segment, and after the last one the zeros. On a GPU segments start at multiples of 4 bytes.
MT_DEVICE void write_block(uint8_t* wire, Segment segment, uint32_t block, const Codes& codes, float scale) {
    store_codes(wire + uint64_t(block) * kBlock, codes);
    if (lane() != 0) return;
    write_scale(wire + uint64_t(segment.blocks) * kBlock, block, segment.ue8m0, scale);
    if (block + 1 < segment.blocks) return;
    for (uint64_t at = segment.blocks * (kBlock + segment.scale_bytes()); at < segment.stride(); at++) wire[at] = 0;
}

template <class E>
MT_DEVICE void read_block(const uint8_t* wire, Segment segment, uint32_t block, float (&values)[kElements]) {
    const float scale = read_scale(wire + uint64_t(segment.blocks) * kBlock, block, segment.ue8m0);
    dequantize<E>(load_codes(wire + uint64_t(block) * kBlock), scale, values);
}

// Where a block of a tensor in segments lies (format.Layout).
struct Place {
    uint32_t segment;
    uint32_t block;  // of the segment
    uint64_t start;  // of the tensor's elements
    uint64_t count;  // of the elements from there on that belong to the segment
};

MT_DEVICE Place find_block(uint32_t block, Segment segment, uint64_t segment_numel, uint64_t numel) {
    Place place;
    place.segment = block / segment.blocks;
    place.block = block - place.segment * segment.blocks;
    place.start = place.segment * segment_numel + uint64_t(place.block) * kBlock;
    const uint64_t segment_end = (place.segment + uint64_t(1)) * segment_numel;
    const uint64_t end = segment_end < numel ? segment_end : numel;
    place.count = end > place.start ? end - place.start : 0;
    return place;
}

// The sum of one block of the segments of all ranks, added in their order.
template <class E>
MT_DEVICE void sum_ranks(const uint8_t* wire, uint32_t ranks, Segment segment, uint32_t block,
                         float (&total)[kElements]) {
    MT_UNROLL for (uint32_t i = 0; i < kElements; i++) total[i] = 0.0f;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        float values[kElements];
        read_block<E>(wire + rank * segment.stride(), segment, block, values);
        MT_UNROLL for (uint32_t i = 0; i < kElements; i++) total[i] += values[i];
    }
}

// Quantizes values + residual; what the codes do not hold of it becomes the residual, 0 in a block that is not finite.
template <class E>
MT_DEVICE Codes quantize_with_feedback(float (&values)[kElements], float* residual, uint64_t count, bool ue8m0,
                                       float& scale) {
    float kept[kElements];
    load(residual, count, kept);
    MT_UNROLL for (uint32_t i = 0; i < kElements; i++) values[i] += kept[i];
    scale = block_scale<E>(values, ue8m0);
    const Codes codes = quantize<E>(values, scale);
    dequantize<E>(codes, scale, kept);
    const bool poisoned = is_nan(scale);
    MT_UNROLL for (uint32_t i = 0; i < kElements; i++) kept[i] = poisoned ? 0.0f : values[i] - kept[i];
    store(residual, count, kept);
    return codes;
}
