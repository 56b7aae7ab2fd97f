// fp32 and bf16 to FP8 codes and back, a lane's elements at a time.
//
// Codes are OCP's on every device. gfx942 converts in the FNUZ flavour (MT_FNUZ), where every code means half as much,
// so there the caller multiplies by kEncode before and kDecode after, both folded into the block's scale.
#pragma once
#include "target.h"

#if defined(MT_FNUZ)
constexpr float kEncode = 0.5f, kDecode = 2.0f;
#else
constexpr float kEncode = 1.0f, kDecode = 1.0f;
#endif

struct E4M3 {
    static constexpr int mantissa = 3, bias = 7;
    static constexpr float max = 448.0f;
};

struct E5M2 {
    static constexpr int mantissa = 2, bias = 15;
    static constexpr float max = 57344.0f;
};

struct Bf16 {
    uint16_t bits;
};

MT_DEVICE float to_float(float value) { return value; }
MT_DEVICE float to_float(Bf16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

MT_DEVICE void from_float(float value, float& out) { out = value; }
MT_DEVICE void from_float(float value, Bf16& out) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // to nearest, ties to even
    out.bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// A lane's codes: words for the GPU's conversion instructions, bytes for the CPU's vectors.
struct alignas(16) Codes {
#if defined(MT_GPU)
    uint32_t words[kElements / 4];
#else
    uint8_t bytes[kElements];
#endif
};

#if defined(__AMDGCN__)

MT_DEVICE uint32_t encode4(E4M3, float a, float b, float c, float d) {
    const int low = __builtin_amdgcn_cvt_pk_fp8_f32(a, b, 0, false);
    return uint32_t(__builtin_amdgcn_cvt_pk_fp8_f32(c, d, low, true));
}
MT_DEVICE uint32_t encode4(E5M2, float a, float b, float c, float d) {
    const int low = __builtin_amdgcn_cvt_pk_bf8_f32(a, b, 0, false);
    return uint32_t(__builtin_amdgcn_cvt_pk_bf8_f32(c, d, low, true));
}
template <bool high>
MT_DEVICE auto decode2(E4M3, uint32_t word) {
    return __builtin_amdgcn_cvt_pk_f32_fp8(int(word), high);
}
template <bool high>
MT_DEVICE auto decode2(E5M2, uint32_t word) {
    return __builtin_amdgcn_cvt_pk_f32_bf8(int(word), high);
}

#elif defined(__CUDACC__)

struct Pair {
    float low, high;
    MT_METHOD float operator[](int index) const { return index ? high : low; }
};

// The instructions take and give the upper half first. Out of half precision no value is rounded.
#define MT_CONVERSIONS(E, TYPE)                                                                                \
    MT_DEVICE uint32_t encode4(E, float a, float b, float c, float d) {                                        \
        uint16_t low, high;                                                                                    \
        asm("cvt.rn.satfinite." TYPE "x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));                       \
        asm("cvt.rn.satfinite." TYPE "x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));                      \
        return uint32_t(high) << 16 | low;                                                                     \
    }                                                                                                          \
    template <bool high>                                                                                       \
    MT_DEVICE Pair decode2(E, uint32_t word) {                                                                 \
        Pair pair;                                                                                             \
        asm("{.reg .b32 both; .reg .b16 low, high; cvt.rn.f16x2." TYPE "x2 both, %2; mov.b32 {low, high}, both;" \
            "cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"                                                      \
            : "=f"(pair.low), "=f"(pair.high)                                                                  \
            : "h"(uint16_t(high ? word >> 16 : word)));                                                        \
        return pair;                                                                                           \
    }
MT_CONVERSIONS(E4M3, "e4m3")
MT_CONVERSIONS(E5M2, "e5m2")
#undef MT_CONVERSIONS

#elif defined(MT_FIBERS)

// What AMD's instructions do.
MT_DEVICE uint32_t encode4(E4M3, float a, float b, float c, float d) { return conversions::encode4<3>(a, b, c, d); }
MT_DEVICE uint32_t encode4(E5M2, float a, float b, float c, float d) { return conversions::encode4<2>(a, b, c, d); }
template <bool high>
MT_DEVICE conversions::Pair decode2(E4M3, uint32_t word) {
    return conversions::decode2<3>(high ? word >> 16 : word);
}
template <bool high>
MT_DEVICE conversions::Pair decode2(E5M2, uint32_t word) {
    return conversions::decode2<2>(high ? word >> 16 : word);
}

#endif

#if defined(MT_GPU)

// Four codes of OCP without the sign of zeros; FNUZ has no negative zero to begin with.
MT_DEVICE uint32_t canonical(uint32_t word) {
#if defined(MT_FNUZ)
    return word;
#else
    const uint32_t not_zero = (word & 0x7f7f7f7fu) + 0x7f7f7f7fu;  // bit 7 of each byte; no byte carries into the next
    return word & (not_zero | 0x7f7f7f7fu);
#endif
}

// values * inverse must be within the element's range, or `keep` false: then all codes are zero.
template <class E>
MT_DEVICE Codes encode(const float (&values)[kElements], float inverse, bool keep) {
    Codes codes;
    MT_UNROLL for (uint32_t i = 0; i < kElements / 4; i++) {
        const float* v = values + 4 * i;
        const uint32_t word = encode4(E{}, v[0] * inverse, v[1] * inverse, v[2] * inverse, v[3] * inverse);
        codes.words[i] = keep ? canonical(word) : 0u;
    }
    return codes;
}

template <class E>
MT_DEVICE void decode(const Codes& codes, float scale, float (&values)[kElements]) {
    MT_UNROLL for (uint32_t i = 0; i < kElements / 4; i++) {
        const auto low = decode2<false>(E{}, codes.words[i]);
        const auto high = decode2<true>(E{}, codes.words[i]);
        values[4 * i] = low[0] * scale;
        values[4 * i + 1] = low[1] * scale;
        values[4 * i + 2] = high[0] * scale;
        values[4 * i + 3] = high[1] * scale;
    }
}

#else

// Without branches, for the vectorizer: the two cases of a normal and a subnormal code are both computed.
template <class E>
MT_DEVICE uint32_t encode1(float value) {
    constexpr int dropped = 23 - E::mantissa;
    constexpr uint32_t rebias = 127 - E::bias;
    constexpr uint32_t smallest_normal = (rebias + 1) << 23;
    // Where fp32's own step is the step of subnormal codes, so that an addition rounds to it.
    constexpr uint32_t magic_bits = uint32_t(127 + 1 - E::bias - E::mantissa + 23) << 23;
    const uint32_t bits = bit_cast<uint32_t>(value), size = bits & 0x7fffffffu;
    const uint32_t rounded = size + ((1u << (dropped - 1)) - 1u) + (size >> dropped & 1u);
    const uint32_t normal = (rounded >> dropped) - (rebias << E::mantissa);
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(size) + bit_cast<float>(magic_bits)) - magic_bits;
    const uint32_t code = size < smallest_normal ? subnormal : normal;
    return code == 0 ? 0u : code | (bits >> 24 & 0x80u);
}

template <class E>
MT_DEVICE float decode1(uint32_t code) {
    constexpr uint32_t rebias = 127 - E::bias;
    const uint32_t size = code & 0x7fu;
    const bool subnormal = size < (1u << E::mantissa);
    // A subnormal is read with the implicit one that it lacks, which is then taken away.
    const float read = bit_cast<float>((size << (23 - E::mantissa)) + ((rebias + (subnormal ? 1u : 0u)) << 23));
    const float value = read - (subnormal ? bit_cast<float>((rebias + 1u) << 23) : 0.0f);
    return bit_cast<float>(bit_cast<uint32_t>(value) | (code & 0x80u) << 24);
}

template <class E>
MT_DEVICE Codes encode(const float (&values)[kElements], float inverse, bool keep) {
    Codes codes;
    const uint32_t mask = keep ? 0xffu : 0u;
    for (uint32_t i = 0; i < kElements; i++) codes.bytes[i] = uint8_t(encode1<E>(values[i] * inverse) & mask);
    return codes;
}

template <class E>
MT_DEVICE void decode(const Codes& codes, float scale, float (&values)[kElements]) {
    for (uint32_t i = 0; i < kElements; i++) values[i] = decode1<E>(codes.bytes[i]) * scale;
}

#endif
