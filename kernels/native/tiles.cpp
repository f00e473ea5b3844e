// Kernels of bfloat16 tiles (see tiles.h).  Needs AVX-512 with BF16, and AMX-BF16 where a panel says that
// the unit multiplies it.

#if defined(__x86_64__)

#include "tiles.h"

#include <cstring>
#include <immintrin.h>

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#pragma GCC target("amx-tile,amx-bf16,prefer-vector-width=512")

#include "tiles_vec.h"
#include "linear_rows.h"

namespace k3 {
namespace {

// Two tiles of weight rows (a: step after step, both tiles of a step side by side) times one or
// two tiles of x.
template <int X>
void block(const uint8_t* a, const uint8_t* b, int64_t b_apart, int64_t steps, float* c,
           int64_t c_apart, bool first) {
    float* lower = c + c_apart;
    settle();
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, c, 64);
        _tile_loadd(2, lower, 64);
        if (X == 2) {
            _tile_loadd(1, c + 256, 64);
            _tile_loadd(3, lower + 256, 64);
        }
    }
    for (int64_t s = 0; s < steps; s++, a += 2 * TILE_BYTES, b += TILE_BYTES) {
        _tile_loadd(6, b, 64);
        _tile_loadd(4, a, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (X == 2) {
            _tile_loadd(7, b + b_apart, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_loadd(5, a + TILE_BYTES, 64);
        _tile_dpbf16ps(2, 5, 6);
        if (X == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 64);
    _tile_stored(2, lower, 64);
    if (X == 2) {
        _tile_stored(1, c + 256, 64);
        _tile_stored(3, lower + 256, 64);
    }
    settle();
}

// The same without the unit: 8 weight rows by two tiles or 16 by one are as many sums as registers hold.
template <int X>
void block_of_pairs(const uint8_t* a, const uint8_t* b, int64_t b_apart, int64_t steps, float* c,
                    int64_t c_apart, bool first) {
    constexpr int R = X == 2 ? 8 : 16;
    for (int64_t i = 0; i < BLOCK_ROWS; i += R)
        pairs<R, X>(a + i / TILE_ROWS * TILE_BYTES + i % TILE_ROWS * 64, 64, 2 * TILE_BYTES, b, TILE_BYTES,
                    b_apart, steps, c + i / TILE_ROWS * c_apart + i % TILE_ROWS * 16, 16, 256, first);
}

// ---- weights to bfloat16: 32 columns of one row at a time, `apart` bytes from one another ----

constexpr int64_t STEP_BYTES = 2 * TILE_BYTES;  // of a packed block: two tiles a step

// Asks for a line of the block that comes next, which lies `ahead` bytes behind this one: it is in
// the second cache when its turn comes.
inline void ask(const uint8_t* from, int64_t ahead) {
    _mm_prefetch(reinterpret_cast<const char*>(from) + ahead, _MM_HINT_T1);
}

void pack_bf16(const uint8_t* from, int64_t ahead, int64_t columns, uint8_t* out) {
    int64_t i = 0;
    for (; i + 32 <= columns; i += 32, from += 64, out += STEP_BYTES) {
        ask(from, ahead);
        _mm512_store_si512(out, _mm512_loadu_si512(from));
    }
    if (i < columns)
        _mm512_store_si512(out, _mm512_maskz_loadu_epi16((1u << (columns - i)) - 1, from));
}

void pack_int8(const uint8_t* from, int64_t ahead, const uint8_t* scale, int64_t columns,
               uint8_t* out) {
    for (int64_t i = 0; i < columns; i += 32, from += 32, out += STEP_BYTES) {
        if (i % 64 == 0) ask(from, ahead);
        uint16_t h;
        std::memcpy(&h, scale + i / 64 * 2, 2);
        const __m512 s = _mm512_set1_ps(from_bf16(h));
        auto* p = reinterpret_cast<const __m128i*>(from);
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p + 1)));
        __m512bh both = _mm512_cvtne2ps_pbh(_mm512_mul_ps(high, s), _mm512_mul_ps(low, s));
        _mm512_store_si512(out, (__m512i)both);
    }
}

// For each scale the 16 codes times 2^(scale - 127) in bfloat16, twice: 16 KB, of which a model
// uses a few lines.
struct Codes {
    alignas(64) uint16_t of[256][32];

    Codes() {
        const float size[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
        for (int s = 0; s < 256; s++)
            for (int c = 0; c < 32; c++) {
                const float factor = float_of(s ? uint32_t(s) << 23 : 0x00400000);
                of[s][c] = to_bf16((c & 8 ? -size[c & 7] : size[c & 7]) * factor);
            }
    }
};

// 32 columns: a byte b becomes the word pair (b, b >> 4) by one shift; vpermw looks at the low 5
// bits, which is why the 16 codes stand twice.
inline void pack_group(const uint8_t* from, const uint16_t* codes, uint8_t* out) {
    auto* p = reinterpret_cast<const __m128i*>(from);
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p));
    bytes = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    _mm512_store_si512(out, _mm512_permutexvar_epi16(bytes, _mm512_load_si512(codes)));
}

void pack_mxfp4(const uint8_t* from, int64_t ahead, const uint8_t* scale, int64_t columns,
                uint8_t* out) {
    static const Codes codes;
    int64_t g = 0;
    for (; g + 4 <= columns / 32; g += 4, from += 64, scale += 4) {
        ask(from, ahead);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++, out += STEP_BYTES)
            pack_group(from + 16 * i, codes.of[scale[i]], out);
    }
    for (; g < columns / 32; g++, from += 16, scale++, out += STEP_BYTES)
        pack_group(from, codes.of[*scale], out);
}

// Weight rows [begin, begin + BLOCK_ROWS) and columns [from, from + columns); zeros below the
// last row.  The next block begins `rows` rows and `further` columns behind.
void pack_weight(const Weight& w, int64_t begin, int64_t from, int64_t columns, int64_t rows,
                 int64_t further, uint8_t* out) {
    const int64_t ahead = rows * w.row_bytes() + further * w.row_bytes() / w.k;
    for (int64_t r = 0; r < BLOCK_ROWS; r++) {
        uint8_t* to = out + r / TILE_ROWS * TILE_BYTES + r % TILE_ROWS * 64;
        if (begin + r >= w.n) {
            for (int64_t i = 0; i < columns; i += 32, to += STEP_BYTES)
                _mm512_store_si512(to, _mm512_setzero_si512());
            continue;
        }
        const uint8_t *row = w.row(begin + r), *scale = w.row_scale(begin + r);
        if (w.kind == W_BF16) {
            pack_bf16(row + 2 * from, ahead, columns, to);
        } else if (w.kind == W_INT8) {
            ask(scale + from / 64 * 2, rows * w.scale_bytes());
            pack_int8(row + from, ahead, scale + from / 64 * 2, columns, to);
        } else {
            ask(scale + from / 32, rows * w.scale_bytes());
            pack_mxfp4(row + from / 2, ahead, scale + from / 32, columns, to);
        }
    }
}

}  // namespace

void Tiles::pack_x(const uint16_t* const* rows, const Panel& x, int64_t tile) {
    for (int64_t b = 0; b < x.blocks(); b++) {
        uint8_t* out = x.at(b, tile);
        for (int64_t s = 0; s < x.steps(b); s++, out += TILE_BYTES) {
            const int64_t from = b * DEPTH + s * TILE_COLUMNS, left = x.k - from;
            const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
            __m512i r[16];
            for (int i = 0; i < 16; i++)
                r[i] = rows[i] ? _mm512_maskz_loadu_epi16(mask, rows[i] + from)
                               : _mm512_setzero_si512();
            transpose(r);
            for (int i = 0; i < 16; i++) _mm512_store_si512(out + 64 * i, r[i]);
        }
    }
}

namespace {

struct Product {
    const Weight& w;
    int64_t begin, end;
    const Panel& x;
    float* c;
    uint8_t* room;

    // Weight rows [i, i + BLOCK_ROWS) times block b of the columns.
    void part(int64_t i, int64_t b, int64_t next_rows, int64_t next_columns) const {
        pack_weight(w, i, b * DEPTH, x.columns(b), next_rows, next_columns, room);
        const int64_t across = x.tiles(), apart = x.steps(b) * TILE_BYTES;
        float* to = c + (i - begin) / TILE_ROWS * across * 256;
        const auto two = x.unit ? block<2> : block_of_pairs<2>;
        const auto one = x.unit ? block<1> : block_of_pairs<1>;
        for (int64_t j = 0; j < across; j += 2)
            (j + 1 < across ? two : one)(room, x.at(b, j), apart, x.steps(b), to + j * 256, across * 256,
                                         b == 0);
    }
};

}  // namespace

void Tiles::multiply(const Weight& w, int64_t begin, int64_t end, const Panel& x, float* c,
                   uint8_t* room) {
    const Unit unit(x.unit);
    const Product product{w, begin, end, x, c, room};
    if (x.rows <= FEW_ROWS) {  // memory is the limit: whole weight rows, in the order they lie
        for (int64_t i = begin; i < end; i += BLOCK_ROWS)
            for (int64_t b = 0; b < x.blocks(); b++) product.part(i, b, BLOCK_ROWS, 0);
        return;
    }
    for (int64_t b = 0; b < x.blocks(); b++)
        for (int64_t i = begin; i < end; i += BLOCK_ROWS) {
            const bool down = i + BLOCK_ROWS < end;
            product.part(i, b, down ? BLOCK_ROWS : begin - i, down ? 0 : DEPTH);
        }
}

void Tiles::write(const float* c, int64_t apart, int64_t weight_rows, int64_t x_rows, uint16_t* out,
                int64_t stride) {
    __m512i low[16], high[16];
    for (int i = 0; i < 16; i++) {
        low[i] = _mm512_loadu_si512(c + 16 * i);
        high[i] = _mm512_loadu_si512(c + apart + 16 * i);
    }
    transpose(low);
    transpose(high);
    const __mmask32 mask = weight_rows >= 32 ? ~0u : (1u << weight_rows) - 1;
    for (int64_t i = 0; i < x_rows; i++) {
        const __m512i half = _mm512_castsi256_si512(narrow(low[i]));
        const __m512i both = _mm512_inserti64x4(half, narrow(high[i]), 1);
        _mm512_mask_storeu_epi16(out + i * stride, mask, both);
    }
}

void Tiles::activate(const Activation& act, const float* const* gate, const float* const* up,
                   uint8_t* out) {
    alignas(64) float a[512], b[512];
    alignas(64) uint16_t y[512];
    for (int t = 0; t < 2; t++) {
        std::memcpy(a + 256 * t, gate[t], TILE_BYTES);
        std::memcpy(b + 256 * t, up[t], TILE_BYTES);
    }
    k3::activate(act, BF16, a, b, 512, y);
    auto* pairs = reinterpret_cast<uint32_t*>(out);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++)
            pairs[16 * i + j] = y[32 * i + j] | uint32_t(y[32 * i + 16 + j]) << 16;
}

}  // namespace k3

#endif
