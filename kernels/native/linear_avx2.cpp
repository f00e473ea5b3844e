// The family ROWS for AVX2 with FMA and F16C.
//
// MXFP4: 32 packed bytes are 8 words of 8 nibbles.  vpermps looks up 8 floats by the low 3 bits of
// each word; the fourth bit is the sign.

#if defined(__x86_64__)

#include <cstring>
#include <immintrin.h>

#include "linear.h"

#pragma GCC target("avx2,fma,f16c")

#include "linear_rows.h"

namespace k3 {
namespace {

struct Avx2 {
    using Vec = __m256;
    static constexpr int LANES = 8, PER_LANE = 1;
    static constexpr int ROWS = 8, X_BYTES = 24 << 10;
    static constexpr bool ROOMY = false;
    static constexpr int AHEAD = 2048;

    static Vec zero() { return _mm256_setzero_ps(); }
    static Vec load(const float* p) { return _mm256_loadu_ps(p); }
    static void pin(Vec& a) { asm("" : "+x"(a)); }
    static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
    static Vec dot(Vec a, Vec b, Vec c) { return fma(a, b, c); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
    static float sum(Vec a) {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }

    // Accumulators: 8 of 16 registers; a single row that is scaled has as many totals.
    template <class D>
    static constexpr int side_by_side(int rb) {
        return rb == 1 ? (D::SCALED ? 2 : 4) : rb <= 4 ? 2 : 1;
    }

    // `bytes` of 32, zeros behind them.
    static __m256i part(const uint8_t* p, int64_t bytes) {
        alignas(32) uint8_t room[32] = {};
        std::memcpy(room, p, size_t(bytes));
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(room));
    }
    static __m256i whole(const uint8_t* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }

    struct Plain {
        static constexpr bool SCALED = false;
        static constexpr int SCALE_BYTES = 0;
        Vec scale() const { return zero(); }
    };

    struct F32 : Plain {
        static constexpr int COLUMNS = 8, VECTORS = 1, INTERLEAVE = 1, BYTES = 32;
        __m256i raw;
        void load(const uint8_t* p, int64_t columns, const uint8_t*) {
            raw = columns == 8 ? whole(p) : part(p, 4 * columns);
        }
        Vec vec(int) const { return _mm256_castsi256_ps(raw); }
    };

    struct Bf16 : Plain {
        static constexpr int COLUMNS = 16, VECTORS = 2, INTERLEAVE = 2, BYTES = 32;
        __m256i raw;
        void load(const uint8_t* p, int64_t columns, const uint8_t*) {
            raw = columns == 16 ? whole(p) : part(p, 2 * columns);
        }
        Vec vec(int j) const {
            return _mm256_castsi256_ps(
                j ? _mm256_and_si256(raw, _mm256_set1_epi32(int(0xffff0000)))
                  : _mm256_slli_epi32(raw, 16));
        }
    };

    struct F16 : Plain {
        static constexpr int COLUMNS = 8, VECTORS = 1, INTERLEAVE = 1, BYTES = 16;
        __m128i raw;
        void load(const uint8_t* p, int64_t columns, const uint8_t*) {
            raw = columns == 8 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                               : _mm256_castsi256_si128(part(p, 2 * columns));
        }
        Vec vec(int) const { return _mm256_cvtph_ps(raw); }
    };

    struct Int8 {
        static constexpr int COLUMNS = 64, VECTORS = 8, INTERLEAVE = 1, BYTES = 64;
        static constexpr bool SCALED = true;
        static constexpr int SCALE_BYTES = 2;
        const uint8_t *raw, *scales;
        void load(const uint8_t* p, int64_t, const uint8_t* s) { raw = p, scales = s; }
        Vec vec(int j) const {
            auto* p = reinterpret_cast<const __m128i*>(raw + 8 * j);
            return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
        }
        Vec scale() const {
            uint16_t h;
            std::memcpy(&h, scales, 2);
            return _mm256_set1_ps(from_bf16(h));
        }
    };

    struct Mxfp4 {
        static constexpr int COLUMNS = 64, VECTORS = 8, INTERLEAVE = 8, BYTES = 32;
        static constexpr bool SCALED = true;
        static constexpr int SCALE_BYTES = 2;
        typedef uint32_t Words __attribute__((vector_size(32)));
        __m256i raw;
        uint32_t low, high;
        void load(const uint8_t* p, int64_t columns, const uint8_t* s) {
            raw = columns == 64 ? whole(p) : part(p, columns / 2);
            low = s[0], high = columns == 64 ? s[1] : 0;
        }
        Vec vec(int j) const {
            const Vec table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
            const __m256i sign = _mm256_set1_epi32(int(0x80000000));
            Vec size = _mm256_permutevar8x32_ps(table, __m256i(Words(raw) >> (4 * j)));
            __m256i minus = _mm256_and_si256(__m256i(Words(raw) << (28 - 4 * j)), sign);
            return _mm256_xor_ps(size, _mm256_castsi256_ps(minus));
        }
        static int bits(uint32_t s) { return s ? int(s << 23) : 0x00400000; }
        Vec scale() const {
            return _mm256_castsi256_ps(
                _mm256_set_m128i(_mm_set1_epi32(bits(high)), _mm_set1_epi32(bits(low))));
        }
    };

    static int64_t prepare_most(Kind, Dtype, const void*, int64_t, float*) { return 0; }
};

}  // namespace

const RowKernels rows_avx2 = kernels<Avx2>();

}  // namespace k3

#endif
