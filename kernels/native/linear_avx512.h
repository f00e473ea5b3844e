// What both families of AVX-512 rows share.  Include it below the target pragma of a file.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace k3 {
namespace {

// 2^(s - 127) on the four lanes of each of four scales: s becomes the exponent.  s = 0, 2^-127, is a
// subnormal number of its own.
inline __m512 mxfp4_scales(uint32_t four) {
    const __m512i top = _mm512_setr_epi32(
        0x00808080, 0x00808080, 0x00808080, 0x00808080, 0x01808080, 0x01808080, 0x01808080, 0x01808080,
        0x02808080, 0x02808080, 0x02808080, 0x02808080, 0x03808080, 0x03808080, 0x03808080, 0x03808080);
    __m512i s = _mm512_shuffle_epi8(_mm512_set1_epi32(int(four)), top);
    s = _mm512_max_epu32(_mm512_srli_epi32(s, 1), _mm512_set1_epi32(0x00400000));
    return _mm512_castsi512_ps(s);
}

struct Avx512Base {
    using Vec = __m512;
    static constexpr int LANES = 16, AHEAD = 2048;

    static Vec zero() { return _mm512_setzero_ps(); }
    static Vec load(const float* p) { return _mm512_loadu_ps(p); }
    static void pin(Vec& a) { asm("" : "+v"(a)); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
    static float sum(Vec a) { return _mm512_reduce_add_ps(a); }

    // Decoders without what they make of their bytes.
    struct Bf16Bytes {
        static constexpr int COLUMNS = 32, BYTES = 64, SCALE_BYTES = 0;
        static constexpr bool SCALED = false;
        __m512i raw;
        void load(const uint8_t* p, int64_t columns, const uint8_t*) {
            raw = columns == 32 ? _mm512_loadu_si512(p)
                                : _mm512_maskz_loadu_epi16((1u << columns) - 1, p);
        }
        Vec scale() const { return zero(); }
    };

    struct Mxfp4Bytes {
        static constexpr int COLUMNS = 128, BYTES = 64, SCALE_BYTES = 4;
        static constexpr bool SCALED = true;
        __m512i raw;
        uint32_t four;
        void load(const uint8_t* p, int64_t columns, const uint8_t* s) {
            four = 0;
            if (columns == 128) {
                raw = _mm512_loadu_si512(p);
                std::memcpy(&four, s, 4);
            } else {
                raw = _mm512_maskz_loadu_epi32((1 << columns / 8) - 1, p);
                for (int64_t i = 0; i < columns / 32; i++) four |= uint32_t(s[i]) << 8 * i;
            }
        }
        Vec scale() const { return mxfp4_scales(four); }
    };
};

}  // namespace
}  // namespace k3
