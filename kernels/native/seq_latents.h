// Packed latents back to numbers; kernels/latent_format.py says how a row lies in memory.
#pragma once

#include "seq_vec.h"

namespace k3 {
namespace {

typedef int8_t Vb __attribute__((vector_size(K3_BYTES / 4), may_alias));
typedef int16_t Vs __attribute__((vector_size(K3_BYTES / 2), may_alias));

// 16 codes as signed integers.
K3_INLINE I load_codes(const int8_t* from) {
    I r;
    K3_EACH {
        Vb some;
        memcpy(&some, from + p * (K3_BYTES / 4), sizeof some);
        // in two steps: GCC takes one that is four times as wide apart, byte by byte
        r.v[p] = __builtin_convertvector(__builtin_convertvector(some, Vs), Vi);
    }
    return r;
}

K3_INLINE F integers(I code) {
    F r;
    K3_EACH r.v[p] = __builtin_convertvector(code.v[p], V);
    return r;
}

// Floats of 4 bits of exponent (bias 7) and 3 of mantissa; their NaN is not told apart.
K3_INLINE F small_floats(I code) {
    I size, normal, sign, tiny;
    K3_EACH {
        sign.v[p] = code.v[p] & INT32_MIN;
        size.v[p] = code.v[p] & 0x7f;
        normal.v[p] = (size.v[p] << 20) + (120 << 23);
        tiny.v[p] = size.v[p] < 8;  // the exponent of zero: eighths of 2^-6, as an integer
    }
    I r = bits(choose(tiny, integers(size) * 0x1p-9f, number(normal)));
    K3_EACH r.v[p] = r.v[p] | sign.v[p];
    return number(r);
}

K3_INLINE float widened(Bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float r;
    memcpy(&r, &u, sizeof r);
    return r;
}

template <bool FLOATS, class T>
K3_INLINE void unpack_group(const int8_t* codes, float scale, T* out, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t n = count - i;
        int8_t last[LANES];  // memory beyond the codes is not touched
        if (n < LANES) memcpy(last, codes + i, size_t(n));
        I code = load_codes(n < LANES ? last : codes + i);
        store(out + i, (FLOATS ? small_floats(code) : integers(code)) * scale, n);
    }
}

template <bool FLOATS, class T>
void unpack_rows(const UnpackArgs& a, int64_t begin, int64_t end) {
    constexpr int64_t GROUP = 64;  // numbers that share a scale
    for (int64_t r = begin; r < end; r++) {
        auto row = static_cast<const char*>(a.blocks[r / a.block_rows]) + r % a.block_rows * a.row;
        auto scale = reinterpret_cast<const Bf16*>(row + a.scales);
        auto codes = reinterpret_cast<const int8_t*>(row + a.codes);
        auto out = static_cast<T*>(a.out) + r * (a.kv_lora + a.rope);
        int64_t i = 0;
        for (; i + GROUP <= a.kv_lora; i += GROUP)
            unpack_group<FLOATS>(codes + i, widened(*scale++), out + i, GROUP);
        if (i < a.kv_lora) unpack_group<FLOATS>(codes + i, widened(*scale), out + i, a.kv_lora - i);
        memcpy(out + a.kv_lora, row, size_t(a.rope) * sizeof(T));
    }
}

void unpack_latents(const UnpackArgs& a, int64_t begin, int64_t end) {
    if (a.type == BF16)
        a.floats ? unpack_rows<true, Bf16>(a, begin, end) : unpack_rows<false, Bf16>(a, begin, end);
    else
        a.floats ? unpack_rows<true, float>(a, begin, end) : unpack_rows<false, float>(a, begin, end);
}

}  // namespace
}  // namespace k3
