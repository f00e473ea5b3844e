// Sixteen floats at a time: the same lanes and the same order on every instruction set.
//
// The including file defines K3_BYTES, the size of a register.  Everything lives in an unnamed
// namespace, since each file compiles its own copy.  Only fused() differs between instruction sets:
// on x86 without FMA it rounds twice.
#pragma once

#include <cstring>

#if K3_BYTES > 16
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "seq.h"

#define K3_INLINE static inline __attribute__((always_inline))

namespace k3 {
namespace {

constexpr int64_t LANES = 16;
constexpr int PARTS = 64 / K3_BYTES;

typedef float V __attribute__((vector_size(K3_BYTES), may_alias));
typedef int32_t Vi __attribute__((vector_size(K3_BYTES), may_alias));
typedef uint32_t Vu __attribute__((vector_size(K3_BYTES), may_alias));
typedef uint16_t Vh __attribute__((vector_size(K3_BYTES / 2), may_alias));

struct Bf16 {
    uint16_t bits;
};

struct F {
    V v[PARTS];
};
struct I {
    Vi v[PARTS];
};

// fused(a, b, c) = a b + c; sum: lanes (i, i + 8), then (i, i + 4), (i, i + 2), (i, i + 1).
#if K3_BYTES == 64
K3_INLINE V fused(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif K3_BYTES == 32
K3_INLINE V fused(V a, V b, V c) { return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__aarch64__)
K3_INLINE V fused(V a, V b, V c) {
    return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
K3_INLINE V fused(V a, V b, V c) { return a * b + c; }
#endif

#if K3_BYTES == 16
K3_INLINE float sum(F a) {
    V four = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
#else
K3_INLINE float sum(F a) {
#if K3_BYTES == 64
    __m512d wide = (__m512d)a.v[0];
    __m256 eight = _mm256_add_ps((__m256)_mm512_castpd512_pd256(wide),
                                 (__m256)_mm512_extractf64x4_pd(wide, 1));
#else
    __m256 eight = (__m256)(a.v[0] + a.v[1]);
#endif
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#endif

#define K3_EACH for (int p = 0; p < PARTS; p++)

K3_INLINE F operator+(F a, F b) {
    K3_EACH a.v[p] = a.v[p] + b.v[p];
    return a;
}
K3_INLINE F operator-(F a, F b) {
    K3_EACH a.v[p] = a.v[p] - b.v[p];
    return a;
}
K3_INLINE F operator*(F a, F b) {
    K3_EACH a.v[p] = a.v[p] * b.v[p];
    return a;
}
K3_INLINE F operator/(F a, F b) {
    K3_EACH a.v[p] = a.v[p] / b.v[p];
    return a;
}
K3_INLINE F all(float x) {
    F r;
    K3_EACH r.v[p] = x - V{};
    return r;
}
K3_INLINE F operator*(F a, float b) { return a * all(b); }
K3_INLINE F operator+(F a, float b) { return a + all(b); }
K3_INLINE F operator-(F a, float b) { return a - all(b); }
K3_INLINE F fused(F a, F b, F c) {
    K3_EACH a.v[p] = fused(a.v[p], b.v[p], c.v[p]);
    return a;
}
K3_INLINE F fused(float a, F b, F c) { return fused(all(a), b, c); }
K3_INLINE F least(F a, F b) {  // NaN in a stays
    K3_EACH a.v[p] = a.v[p] > b.v[p] ? b.v[p] : a.v[p];
    return a;
}
K3_INLINE F most(F a, F b) {
    K3_EACH a.v[p] = a.v[p] < b.v[p] ? b.v[p] : a.v[p];
    return a;
}
K3_INLINE I less(F a, F b) {
    I r;
    K3_EACH r.v[p] = a.v[p] < b.v[p];
    return r;
}
K3_INLINE F choose(I where, F yes, F no) {
    K3_EACH yes.v[p] = where.v[p] ? yes.v[p] : no.v[p];
    return yes;
}
K3_INLINE I bits(F a) {
    I r;
    K3_EACH r.v[p] = (Vi)a.v[p];
    return r;
}
K3_INLINE F number(I a) {
    F r;
    K3_EACH r.v[p] = (V)a.v[p];
    return r;
}

// ---- memory: any alignment; bfloat16 is rounded to nearest, ties to even, and NaN stays NaN ----

K3_INLINE F load(const float* from) {
    F r;
    K3_EACH memcpy(&r.v[p], from + p * (K3_BYTES / 4), sizeof r.v[p]);
    return r;
}
K3_INLINE F load(const Bf16* from) {
    F r;
    K3_EACH {
        Vh half;
        memcpy(&half, from + p * (K3_BYTES / 4), sizeof half);
        r.v[p] = (V)(__builtin_convertvector(half, Vu) << 16);
    }
    return r;
}
K3_INLINE void store(float* to, F a) {
    K3_EACH memcpy(to + p * (K3_BYTES / 4), &a.v[p], sizeof a.v[p]);
}
K3_INLINE Vu rounded(V a) {  // the upper 16 bits, still there
    Vu u = (Vu)a;
    Vu r = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
    return a == a ? r : (r & 0) + 0x7fc00000u;
}
K3_INLINE void store(Bf16* to, F a) {
    K3_EACH {
        Vh half = __builtin_convertvector(rounded(a.v[p]) >> 16, Vh);
        memcpy(to + p * (K3_BYTES / 4), &half, sizeof half);
    }
}
// The first n of 16; lanes beyond are zero, and memory beyond is not touched.
template <class T>
K3_INLINE F load(const T* from, int64_t n) {
    if (n >= LANES) return load(from);
    T buffer[LANES] = {};
    memcpy(buffer, from, size_t(n) * sizeof(T));
    return load(buffer);
}
template <class T>
K3_INLINE void store(T* to, F a, int64_t n) {
    if (n >= LANES) return store(to, a);
    T buffer[LANES];
    store(buffer, a);
    memcpy(to, buffer, size_t(n) * sizeof(T));
}
K3_INLINE F load_as(const void* from, Dtype type, int64_t at, int64_t n) {
    return type == BF16 ? load(static_cast<const Bf16*>(from) + at, n)
                        : load(static_cast<const float*>(from) + at, n);
}
// What is left of `a` when it is stored as T.
template <class T>
K3_INLINE F as(F a) {
    if constexpr (sizeof(T) == sizeof(Bf16)) K3_EACH a.v[p] = (V)rounded(a.v[p]);
    return a;
}
K3_INLINE int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// f(i, count) for each group of 16 of n numbers; only the last may have fewer.
#define K3_GROUP [&](int64_t i, int64_t n) __attribute__((always_inline))
template <class Body>
K3_INLINE void groups(int64_t n, const Body& f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) f(i, LANES);
    if (i < n) f(i, n - i);
}

// ---- functions, within two units in the last place; NaN stays NaN ----
// Polynomials from the Cephes library (S. Moshier), single precision.

K3_INLINE F power_of_two(I exponent) {
    K3_EACH exponent.v[p] = (exponent.v[p] + 127) << 23;
    return number(exponent);
}

K3_INLINE F exp(F x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the integer
    x = most(least(x, all(89.0f)), all(-104.0f));
    F shifted = x * 1.44269504088896341f + ROUND;
    F n = shifted - ROUND;
    F r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    F y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = (y * (r * r) + r) + 1.0f;
    I whole = bits(shifted), half, rest;  // 2^n in two steps: one alone may leave the range
    K3_EACH {
        Vi e = whole.v[p] - 0x4b400000;
        half.v[p] = e >> 1;
        rest.v[p] = e - (e >> 1);
    }
    return y * power_of_two(half) * power_of_two(rest);
}

// For normal x > 0.
K3_INLINE F log(F x) {
    I raw = bits(x), mantissa;
    F e;
    K3_EACH {
        Vi exponent = (raw.v[p] - 0x3f3504f3) >> 23;  // so that the mantissa is in [sqrt 1/2, sqrt 2)
        mantissa.v[p] = raw.v[p] - (exponent << 23);
        e.v[p] = __builtin_convertvector(exponent, V);
    }
    F m = number(mantissa) - 1.0f, z = m * m;
    F y = m * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * z + e * -2.12194440e-4f - z * 0.5f;
    return (x - x) + ((m + y) + e * 0.693359375f);
}

// For x >= 0: what 1 + x rounds away comes back as a first-order term.
K3_INLINE F log1p(F x) {
    F u = x + 1.0f;
    return log(u) + (x - (u - 1.0f)) / u;
}

K3_INLINE F sigmoid(F x) { return all(1.0f) / (exp(all(0.0f) - x) + 1.0f); }

K3_INLINE F tanh(F x) {
    I sign = bits(x), size = sign;
    K3_EACH {
        sign.v[p] = sign.v[p] & INT32_MIN;
        size.v[p] = size.v[p] & INT32_MAX;
    }
    F a = number(size), z = x * x;
    I large = bits(all(1.0f) - all(2.0f) / (exp(a + a) + 1.0f));
    K3_EACH large.v[p] = large.v[p] | sign.v[p];
    F y = z * -5.70498872745e-3f + 2.06390887954e-2f;
    y = y * z - 5.37397155531e-2f;
    y = y * z + 1.33314422036e-1f;
    y = y * z - 3.33332819422e-1f;
    return choose(less(a, all(0.625f)), y * z * x + x, number(large));
}

K3_INLINE float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }

// The sum of squares of n numbers: 64 partial sums, then a tree.
template <class T>
K3_INLINE float sum_of_squares(const T* x, int64_t n) {
    F s[4] = {all(0), all(0), all(0), all(0)};
    int64_t done = n / (4 * LANES) * (4 * LANES);
    for (int64_t i = 0; i < done; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            F a = load(x + i + j * LANES);
            s[j] = s[j] + a * a;
        }
    for (int j = 0; done < n; done += LANES, j++) {
        F a = load(x + done, n - done);
        s[j] = s[j] + a * a;
    }
    return sum((s[0] + s[1]) + (s[2] + s[3]));
}

// Numbers below 1e-38 count as zero while this lives: arithmetic with them is a hundred times slower,
// and long decays are full of them.
struct FlushTiny {
#if defined(__x86_64__)
    unsigned before = __builtin_ia32_stmxcsr();
    FlushTiny() { __builtin_ia32_ldmxcsr(before | 0x8040); }
    ~FlushTiny() { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
    uint64_t before;
    FlushTiny() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before));
        __asm__ volatile("msr fpcr, %0" : : "r"(before | 1u << 24));
    }
    ~FlushTiny() { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }
#endif
};

// f for the element type that the flag names.
#define K3_TYPED(type, f, ...) \
    ((type) == BF16 ? f<Bf16>(__VA_ARGS__) : f<float>(__VA_ARGS__))

}  // namespace
}  // namespace k3
