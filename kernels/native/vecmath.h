// exp, sigmoid, tanh and the roundings between float and the 16-bit formats, for loops that the
// compiler turns into vectors.
//
// Written with selects instead of branches and with plain multiplies and adds, so that a value has
// the same bits in a vector and in the scalar rest of a loop.  Include it below the target pragma
// of a file: each instruction set compiles its own copy.  NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>

namespace k3 {
namespace {

inline float float_of(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline uint32_t bits_of(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}

inline float from_bf16(uint16_t h) { return float_of(uint32_t(h) << 16); }

// To the nearest, ties to even, as torch rounds.
inline uint16_t to_bf16(float f) {
    uint32_t u = bits_of(f);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return uint16_t((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// Exact for every half, subnormals included: a multiply puts the exponent right.
inline float from_f16(uint16_t h) {
    uint32_t u = uint32_t(h & 0x7fff) << 13;
    float f = float_of(u) * float_of(0x77800000);  // 2^112
    uint32_t wide = (h & 0x7c00) == 0x7c00 ? (u | 0x7f800000) : bits_of(f);
    return float_of(wide | uint32_t(h & 0x8000) << 16);
}

// e^x within 1 ulp (Cody and Waite; polynomial of Cephes expf).  0 below -87.3: a subnormal
// number would cost every later operation on it a hundredfold.  inf above 88.73.
inline float exp_(float x) {
    const bool tiny = x < -87.3f;
    x = tiny ? 0.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    float n = (x * 1.44269504f + shift) - shift;
    float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    n = n == n ? n : 0.0f;  // p is NaN then
    // In two steps, because 2^128 alone is infinite.
    const int whole = int(n), half = whole >> 1;
    float low = float_of(uint32_t(half + 127) << 23);
    float high = float_of(uint32_t(whole - half + 127) << 23);
    return tiny ? 0.0f : p * low * high;
}

inline float sigmoid_(float x) {
    float e = exp_(-float_of(bits_of(x) & 0x7fffffff));
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// Within 2 ulp: an odd polynomial below 0.625 (Cephes tanhf), else 1 - 2 / (e^2x + 1).
inline float tanh_(float x) {
    float size = float_of(bits_of(x) & 0x7fffffff);
    float z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    float small = (p * z) * x + x;
    float large = 1.0f - 2.0f / (exp_(size + size) + 1.0f);
    large = float_of(bits_of(large) | (bits_of(x) & 0x80000000));
    return size < 0.625f ? small : large;
}

}  // namespace
}  // namespace k3
