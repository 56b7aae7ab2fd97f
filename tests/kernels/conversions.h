// What the GPUs' conversion instructions between fp32 and FP8 do, found by looking at all codes: in the OCP flavour
// (gfx950), or with MT_FNUZ in AMD's own (gfx942).
#pragma once
#include <math.h>
#include <stdint.h>

namespace conversions {

#if defined(MT_FNUZ)
constexpr bool kFnuz = true;
#else
constexpr bool kFnuz = false;
#endif

struct Pair {
    float values[2];
    float operator[](int index) const { return values[index]; }
};

// Of an element with so many bits of mantissa: 3 for e4m3, 2 for e5m2.
template <int mantissa>
float decode(uint8_t code) {
    constexpr int bias = (mantissa == 3 ? 7 : 15) + (kFnuz ? 1 : 0);
    const int size = code & 0x7f, exponent = size >> mantissa, fraction = size & ((1 << mantissa) - 1);
    if (kFnuz && code == 0x80) return NAN;
    if (!kFnuz && mantissa == 3 && size == 0x7f) return NAN;
    if (!kFnuz && mantissa == 2 && exponent == 31 && fraction) return NAN;
    float value = ldexpf(float(exponent ? fraction + (1 << mantissa) : fraction), (exponent ? exponent : 1) - bias - mantissa);
    if (!kFnuz && mantissa == 2 && exponent == 31) value = INFINITY;
    return code & 0x80 ? -value : value;
}

// To nearest, ties to even. What is out of range becomes NaN, which no test overlooks: a kernel must not ask for it.
template <int mantissa>
uint8_t encode(float value) {
    constexpr int last = kFnuz ? 0x7f : mantissa == 3 ? 0x7e : 0x7b;
    constexpr uint8_t nan = kFnuz ? 0x80 : 0x7f;
    const double size = fabs(double(value));
    int low = 0, high = last + 1;  // codes are in the order of their values
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (decode<mantissa>(uint8_t(middle)) <= size ? low : high) = middle;
    }
    const double below = decode<mantissa>(uint8_t(low));
    // What the next code would be if the range went on.
    const double step = low < last ? decode<mantissa>(uint8_t(low + 1)) - below : below - decode<mantissa>(uint8_t(low - 1));
    const double over = size - below;
    if (over > step / 2 || (over == step / 2 && low % 2)) low++;
    if (low > last || isnan(value)) return nan;
    if (kFnuz && low == 0) return 0;
    return uint8_t(low | (signbit(value) ? 0x80 : 0));
}

template <int mantissa>
uint32_t encode4(float a, float b, float c, float d) {
    return uint32_t(encode<mantissa>(a)) | uint32_t(encode<mantissa>(b)) << 8 | uint32_t(encode<mantissa>(c)) << 16 |
           uint32_t(encode<mantissa>(d)) << 24;
}

// The low two codes of a word.
template <int mantissa>
Pair decode2(uint32_t word) {
    return Pair{{decode<mantissa>(uint8_t(word)), decode<mantissa>(uint8_t(word >> 8))}};
}

}  // namespace conversions
