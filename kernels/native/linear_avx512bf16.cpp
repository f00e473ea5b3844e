// The family ROWS for AVX-512 with BF16, for activations in bfloat16: a lane takes a pair of columns at a
// time, exact products of bfloat16 numbers summed in float32.  Subnormal numbers count as zero.  Weights
// in float32 and float16 have the kernels of AVX-512.
//
// MXFP4: 64 packed bytes are 32 words of 4 nibbles.  vpermw looks up 32 bfloat16 by the low 5 bits of each
// word, and the 16 codes stand there twice: nibble j takes one shift and one look-up, no mask.

#if defined(__x86_64__)

#include <cstring>
#include <immintrin.h>

#include "linear.h"

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#pragma GCC target("prefer-vector-width=512")

#include "linear_avx512.h"
#include "linear_rows.h"

namespace k3 {
namespace {

struct Avx512Bf16 : Avx512Base {
    static constexpr int PER_LANE = 2;
    static constexpr int ROWS = 6, X_BYTES = 16 << 10;
    static constexpr bool ROOMY = true;

    static Vec dot(Vec a, Vec b, Vec c) {
        return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
    }
    static Vec mul(Vec a, Vec b) { return dot(a, b, zero()); }

    // Sums, and totals beside them where there are scales: at most 24 of 32 registers.
    template <class D>
    static constexpr int side_by_side(int rb) {
        return rb <= (D::SCALED ? 3 : 6) ? 4 : 2;
    }

    struct Bf16 : Bf16Bytes {
        static constexpr int VECTORS = 1;
        Vec vec(int) const { return _mm512_castsi512_ps(raw); }
    };

    struct Int8 {
        static constexpr int COLUMNS = 64, VECTORS = 2, BYTES = 64;
        static constexpr bool SCALED = true;
        static constexpr int SCALE_BYTES = 2;
        const uint8_t *raw, *scales;
        void load(const uint8_t* p, int64_t, const uint8_t* s) { raw = p, scales = s; }
        static __m512i wide(const uint8_t* p) {
            const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
            return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some)));
        }
        // Column i of 32 beside column 16 + i.  The upper half of a float holds all of such numbers.
        Vec vec(int j) const {
            const __m512i low = _mm512_srli_epi32(wide(raw + 32 * j), 16);
            return _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaa, low, wide(raw + 32 * j + 16)));
        }
        Vec scale() const {
            uint16_t h;
            std::memcpy(&h, scales, 2);
            return _mm512_set1_ps(from_bf16(h));
        }
    };

    struct Mxfp4 : Mxfp4Bytes {
        static constexpr int VECTORS = 4;
        Vec vec(int j) const {
            alignas(64) static constexpr uint16_t CODES[32] = {
                0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
                0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
            const __m512i word = j ? _mm512_srli_epi16(raw, 4 * j) : raw;
            return _mm512_castsi512_ps(_mm512_permutexvar_epi16(word, _mm512_load_si512(CODES)));
        }
    };
};

// Columns in the order in which the decoders take them: of 64 for `Int8`, of 128 for `Mxfp4`.
void by_half(const uint16_t* from, uint16_t* out) {
    for (int j = 0; j < 64; j += 32)
        for (int i = 0; i < 16; i++) out[j + 2 * i] = from[j + i], out[j + 2 * i + 1] = from[j + 16 + i];
}

void by_nibble(const uint16_t* from, uint16_t* out) {
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++) out[32 * j + i] = from[4 * i + j];
}

int64_t width(Kind kind, int64_t k) {
    switch (kind) {
        case W_BF16: return padded<Avx512Bf16::Bf16>(k) / 2;
        case W_INT8: return padded<Avx512Bf16::Int8>(k) / 2;
        case W_MXFP4: return padded<Avx512Bf16::Mxfp4>(k) / 2;
        default: return rows_avx512.width(kind, k);
    }
}

void prepare(Kind kind, Dtype dtype, const void* x, int64_t k, float* out) {
    if (kind == W_F32 || kind == W_F16) return rows_avx512.prepare(kind, dtype, x, k, out);
    auto* from = static_cast<const uint16_t*>(x);
    auto* to = reinterpret_cast<uint16_t*>(out);
    const int64_t wide = 2 * width(kind, k);
    if (kind == W_BF16) {
        std::memcpy(to, from, size_t(k) * 2);
        std::memset(to + k, 0, size_t(wide - k) * 2);
        return;
    }
    const auto in_order = kind == W_INT8 ? by_half : by_nibble;
    const int64_t columns = kind == W_INT8 ? 64 : 128;
    int64_t i = 0;
    for (; i + columns <= k; i += columns) in_order(from + i, to + i);
    if (i == k) return;
    uint16_t rest[128] = {};
    std::memcpy(rest, from + i, size_t(k - i) * 2);
    in_order(rest, to + i);
}

void dot(const Weight& w, int64_t begin, int64_t end, const float* const* x, int64_t rows, float* out,
         int64_t stride) {
    using S = Avx512Bf16;
    switch (w.kind) {
        case W_BF16: return dot_kind<S, S::Bf16>(w, begin, end, x, rows, out, stride);
        case W_INT8: return dot_kind<S, S::Int8>(w, begin, end, x, rows, out, stride);
        case W_MXFP4: return dot_kind<S, S::Mxfp4>(w, begin, end, x, rows, out, stride);
        default: return rows_avx512.dot(w, begin, end, x, rows, out, stride);
    }
}

}  // namespace

const RowKernels rows_avx512_bf16 = {width, prepare, dot, store, activate};

}  // namespace k3

#endif
