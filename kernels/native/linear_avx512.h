// What both families of AVX-512 rows share.  Include it below the target pragma of a file.
#pragma once

#include <cstdint>
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

}  // namespace
}  // namespace k3
