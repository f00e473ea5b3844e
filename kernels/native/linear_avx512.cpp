// The family ROWS for AVX-512 (F, BW, VL, DQ).
//
// MXFP4: 64 packed bytes are 16 words of 8 nibbles.  vpermps looks up 16 floats by the low 4 bits
// of each word, so nibble j takes one shift and one look-up, no mask.

#if defined(__x86_64__)

#include <cstring>
#include <immintrin.h>

#include "linear.h"

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")

#include "linear_avx512.h"
#include "linear_rows.h"

namespace k3 {
namespace {

struct Avx512 : Avx512Base {
    static constexpr int PER_LANE = 1;
    static constexpr int ROWS = 8, X_BYTES = 24 << 10;
    static constexpr bool ROOMY = false;

    static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
    static Vec dot(Vec a, Vec b, Vec c) { return fma(a, b, c); }

    // Accumulators: 16 of 32 registers.
    template <class D>
    static constexpr int side_by_side(int rb) {
        return rb <= 4 ? 4 : 2;
    }

    struct F32 {
        static constexpr int COLUMNS = 16, VECTORS = 1, INTERLEAVE = 1, BYTES = 64;
        static constexpr bool SCALED = false;
        static constexpr int SCALE_BYTES = 0;
        Vec raw;
        void load(const uint8_t* p, int64_t columns, const uint8_t*) {
            raw = columns == 16 ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps((1 << columns) - 1, p);
        }
        Vec vec(int) const { return raw; }
        Vec scale() const { return raw; }
    };

    struct Bf16 : Bf16Bytes {
        static constexpr int VECTORS = 2, INTERLEAVE = 2;
        Vec vec(int j) const {
            return _mm512_castsi512_ps(
                j ? _mm512_and_si512(raw, _mm512_set1_epi32(int(0xffff0000)))
                  : _mm512_slli_epi32(raw, 16));
        }
    };

    struct F16 {
        static constexpr int COLUMNS = 16, VECTORS = 1, INTERLEAVE = 1, BYTES = 32;
        static constexpr bool SCALED = false;
        static constexpr int SCALE_BYTES = 0;
        __m256i raw;
        void load(const uint8_t* p, int64_t columns, const uint8_t*) {
            raw = columns == 16 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                                : _mm256_maskz_loadu_epi16((1 << columns) - 1, p);
        }
        Vec vec(int) const { return _mm512_cvtph_ps(raw); }
        Vec scale() const { return zero(); }
    };

    struct Int8 {
        static constexpr int COLUMNS = 64, VECTORS = 4, INTERLEAVE = 1, BYTES = 64;
        static constexpr bool SCALED = true;
        static constexpr int SCALE_BYTES = 2;
        const uint8_t *raw, *scales;
        void load(const uint8_t* p, int64_t, const uint8_t* s) { raw = p, scales = s; }
        Vec vec(int j) const {
            auto* p = reinterpret_cast<const __m128i*>(raw) + j;
            return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
        }
        Vec scale() const {
            uint16_t h;
            std::memcpy(&h, scales, 2);
            return _mm512_set1_ps(from_bf16(h));
        }
    };

    struct Mxfp4 : Mxfp4Bytes {
        static constexpr int VECTORS = 8, INTERLEAVE = 8;
        typedef uint32_t Words __attribute__((vector_size(64)));
        Vec vec(int j) const {
            const Vec table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f,
                                             -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
            return _mm512_permutexvar_ps(__m512i(Words(raw) >> (4 * j)), table);
        }
    };

    // The whole chunks of a bfloat16 row in vectors; returns how many columns that is.
    static int64_t prepare_most(Kind kind, Dtype dtype, const void* x, int64_t k, float* out) {
        if (dtype != BF16) return 0;
        auto* from = static_cast<const uint16_t*>(x);
        int64_t i = 0;
        if (kind == W_MXFP4)
            for (; i + 128 <= k; i += 128) transpose(from + i, out + i);
        else if (kind == W_BF16)
            for (; i + 32 <= k; i += 32) {
                __m512i two = _mm512_loadu_si512(from + i);
                _mm512_storeu_si512(out + i, _mm512_slli_epi32(two, 16));
                _mm512_storeu_si512(out + i + 16, high(two));
            }
        else
            for (; i + 16 <= k; i += 16) {
                auto* p = reinterpret_cast<const __m256i*>(from + i);
                __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
                _mm512_storeu_si512(out + i, _mm512_slli_epi32(wide, 16));
            }
        return i;
    }

    static __m512i high(__m512i two) {
        return _mm512_and_si512(two, _mm512_set1_epi32(int(0xffff0000)));
    }

    // 128 columns as a 16 x 4 matrix of pairs, transposed.
    static void transpose(const uint16_t* from, float* out) {
        const __m512i even = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21,
                                               25, 29);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(2));
        __m512i q[4];
        for (int i = 0; i < 4; i++) q[i] = _mm512_loadu_si512(from + 32 * i);
        for (int h = 0; h < 2; h++) {
            __m512i a = _mm512_permutex2var_epi32(q[0], h ? odd : even, q[1]);
            __m512i b = _mm512_permutex2var_epi32(q[2], h ? odd : even, q[3]);
            __m512i first = _mm512_shuffle_i64x2(a, b, 0x44);
            __m512i second = _mm512_shuffle_i64x2(a, b, 0xee);
            float* to = out + 64 * h;
            _mm512_storeu_si512(to, _mm512_slli_epi32(first, 16));
            _mm512_storeu_si512(to + 16, high(first));
            _mm512_storeu_si512(to + 32, _mm512_slli_epi32(second, 16));
            _mm512_storeu_si512(to + 48, high(second));
        }
    }
};

}  // namespace

const RowKernels rows_avx512 = kernels<Avx512>();

}  // namespace k3

#endif
