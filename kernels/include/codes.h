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
    out.bits = uint16_t(int(bits & 0x7fffffffu) > 0x7f800000 ? 0x7fc0u : rounded);
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

// For the vectorizer: no branches, no comparisons of one width that choose values of another.

// A code is its binade's first code and a count of steps, of which a binade has 2^mantissa; the lowest binade goes on
// down to zero. Adding 2^dropped binades above a value makes the sum's own step that of the codes: it rounds, ties to
// even, and its low bits count the steps, from `magic` up or, for negative values, down.
template <class E>
struct Rounding {
    static constexpr int32_t dropped = 23 - E::mantissa;
    static constexpr int32_t lowest = (127 - E::bias + 1) << 23;
    static constexpr int32_t magic = (dropped << 23) + (1 << 22);
};

#if defined(__AVX2__) && !defined(__AVX512F__)
#include <immintrin.h>

// The loops below in instructions, 32 codes at a time, a tenth faster than compilers make them: AVX2 narrows four
// vectors into one with one change of order at the end. AVX-512 has an instruction for it, which they use.
template <class E>
MT_DEVICE Codes encode(const float (&values)[kElements], float inverse, bool keep) {
    typedef Rounding<E> R;
    Codes codes;
    for (uint32_t i = 0; i < kElements; i += 32) {
        __m256i steps[4], binades[4];
        MT_UNROLL for (uint32_t j = 0; j < 4; j++) {
            const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(values + i + 8 * j), _mm256_set1_ps(inverse));
            const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(scaled), _mm256_set1_epi32(0x7f800000));
            const __m256i binade = _mm256_max_epi32(exponent, _mm256_set1_epi32(R::lowest));
            const __m256i magic = _mm256_add_epi32(binade, _mm256_set1_epi32(R::magic));
            const __m256 sum = _mm256_add_ps(scaled, _mm256_castsi256_ps(magic));
            steps[j] = _mm256_sub_epi32(_mm256_castps_si256(sum), magic);
            binades[j] = _mm256_srli_epi32(binade, R::dropped);
        }
        const __m256i step = _mm256_packs_epi16(_mm256_packs_epi32(steps[0], steps[1]),
                                                _mm256_packs_epi32(steps[2], steps[3]));
        const __m256i lowest = _mm256_set1_epi16(R::lowest >> R::dropped);
        const __m256i binade = _mm256_packus_epi16(
            _mm256_sub_epi16(_mm256_packus_epi32(binades[0], binades[1]), lowest),
            _mm256_sub_epi16(_mm256_packus_epi32(binades[2], binades[3]), lowest));
        const __m256i size = _mm256_add_epi8(_mm256_abs_epi8(step), binade);
        const __m256i code = _mm256_or_si256(size, _mm256_and_si256(step, _mm256_set1_epi8(char(0x80))));
        const __m256i kept = _mm256_and_si256(code, _mm256_set1_epi8(keep ? char(0xff) : 0));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes.bytes + i), _mm256_permutevar8x32_epi32(kept, order));
    }
    return codes;
}

#else

template <class E>
MT_DEVICE Codes encode(const float (&values)[kElements], float inverse, bool keep) {
    typedef Rounding<E> R;
    Codes codes;
    int8_t steps[kElements];
    for (uint32_t i = 0; i < kElements; i++) {
        const float scaled = values[i] * inverse;
        const int32_t exponent = int32_t(bit_cast<uint32_t>(scaled) & 0x7f800000u);
        const int32_t binade = exponent > R::lowest ? exponent : R::lowest;
        const uint32_t magic = uint32_t(binade) + uint32_t(R::magic);  // may overflow for what is not kept
        steps[i] = int8_t(bit_cast<uint32_t>(scaled + bit_cast<float>(magic)) - magic);
        codes.bytes[i] = uint8_t((binade - R::lowest) >> R::dropped);
    }
    const uint8_t mask = keep ? 0xff : 0;
    for (uint32_t i = 0; i < kElements; i++) {
        const uint8_t size = uint8_t(codes.bytes[i] + uint8_t(steps[i] < 0 ? -steps[i] : steps[i]));
        codes.bytes[i] = uint8_t((size | (steps[i] & 0x80)) & mask);
    }
    return codes;
}

#endif

template <class E>
MT_DEVICE void decode(const Codes& codes, float scale, float (&values)[kElements]) {
    constexpr uint32_t rebias = 127 - E::bias;
    for (uint32_t i = 0; i < kElements; i++) {
        const uint32_t code = uint32_t(int8_t(codes.bytes[i]));
        const uint32_t size = code << (23 - E::mantissa) & (0x7fu << (23 - E::mantissa));
        // Right for a normal code, too large for a subnormal one, which has no implicit one; and the other way round.
        const int32_t normal = int32_t(size + (rebias << 23));
        const int32_t subnormal =
            bit_cast<int32_t>(bit_cast<float>(size + ((rebias + 1) << 23)) - bit_cast<float>((rebias + 1) << 23));
        const int32_t value = normal < subnormal ? normal : subnormal;  // as floats: neither is negative
        values[i] = bit_cast<float>(uint32_t(value) | (code & 0x80000000u)) * scale;
    }
}

#endif
