// What the kernels of bfloat16 tiles share: the unit's state, products of pairs without it, rounding, a
// transpose.  Include it below the target pragma of a file that needs AMX-BF16 and AVX-512 with BF16:
// where a function is told that there is no unit, it runs none of its instructions.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace k3 {
namespace {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// The compiler does not know which memory the tile instructions read and write: here it has to have
// all of it in order.
inline void settle() { __asm__ volatile("" ::: "memory"); }

// Full tiles for this thread; what was set before (by torch's own kernels) comes back at the end.
struct Unit {
    const bool is;
    TileConfig before;

    explicit Unit(bool there) : is(there) {
        if (!is) return;
        TileConfig wanted;
        for (int i = 0; i < 8; i++) wanted.row_bytes[i] = 64, wanted.rows[i] = 16;
        __asm__ volatile("" : : "r"(&wanted), "r"(&before) : "memory");  // now they are in memory
        _tile_storeconfig(&before);
        _tile_loadconfig(&wanted);
        settle();
    }
    ~Unit() {
        if (!is) return;
        if (before.palette)
            _tile_loadconfig(&before);
        else
            _tile_release();
    }
};

// c [R][16 X] = or += a times b without the unit.  a: rows `a_row` bytes apart, 32 columns of each a step,
// the next ones `a_step` bytes behind.  b: a tile of 16 pairs for 16 columns of c a step (`b_step`), the
// next 16 columns `b_apart` bytes behind.  c: rows `c_row` floats apart, 16 columns after `c_tile`.
template <int R, int X>
inline void pairs(const uint8_t* a, int64_t a_row, int64_t a_step, const uint8_t* b, int64_t b_step,
                  int64_t b_apart, int64_t steps, float* c, int64_t c_row, int64_t c_tile, bool first) {
    __m512 sum[R][X];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int x = 0; x < X; x++)
            sum[r][x] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * c_row + x * c_tile);
    for (int64_t s = 0; s < steps; s++, a += a_step, b += b_step)
#pragma GCC unroll 2
        for (int p = 0; p < 16; p++) {
            __m512bh right[X];
#pragma GCC unroll 4
            for (int x = 0; x < X; x++)
                right[x] = (__m512bh)_mm512_load_si512(b + x * b_apart + 64 * p);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                int32_t pair;
                std::memcpy(&pair, a + r * a_row + 4 * p, 4);
                const auto left = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
                for (int x = 0; x < X; x++) sum[r][x] = _mm512_dpbf16_ps(sum[r][x], left, right[x]);
            }
        }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int x = 0; x < X; x++) _mm512_storeu_ps(c + r * c_row + x * c_tile, sum[r][x]);
}

// To bfloat16 as to_bf16 rounds.
__m256i narrow(__m512i f) {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(f, 16), _mm512_set1_epi32(1));
    __m512i u = _mm512_add_epi32(_mm512_add_epi32(f, _mm512_set1_epi32(0x7fff)), odd);
    const __m512 number = _mm512_castsi512_ps(f);
    const __mmask16 nan = _mm512_cmp_ps_mask(number, number, _CMP_UNORD_Q);
    u = _mm512_mask_mov_epi32(_mm512_srli_epi32(u, 16), nan, _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(u);
}

void transpose(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

}  // namespace
}  // namespace k3
