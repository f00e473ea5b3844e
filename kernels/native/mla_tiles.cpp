// See mla_tiles.h.  Needs AVX-512 with BF16, and AMX-BF16 where there is a unit.
//
// A head's keys and values of a block are W c for all 256 latents, by the same products as any other
// weight (tiles.h), and rounded as those are.  Scores are bfloat16 times bfloat16; a share goes
// to its values as the sum of two bfloat16 numbers, which leaves 16 bits of it.  Every product is a
// chain of sums of pairs in an order that follows from sizes alone, so a row's bits follow from the
// latents up to its position.

#if defined(__x86_64__)

#include "mla_tiles.h"

#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "tiles.h"

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#pragma GCC target("amx-tile,amx-bf16,prefer-vector-width=512")

#include "tiles_vec.h"
#include "vecmath.h"

namespace k3 {
namespace {

constexpr int64_t KEYS = 256, QUERY_ROWS = 64;  // of a latent block, of a query
constexpr int64_t KEY_TILES = KEYS / TILE_ROWS, KEY_STEPS = KEYS / TILE_COLUMNS;
constexpr int64_t PACKED = 2 << 20;  // bytes of latents that stay packed while heads go over them
constexpr int PROMPT_SCRATCH = 10;

inline int64_t padded(int64_t n) { return (n + 31) / 32 * 32; }

// c [32][32] (rows `c_row` floats apart) = or += a times b: a's rows lie `a_row` bytes apart, b is
// packed as of tiles.h, its second tile of columns `b_apart` bytes behind.  b is gone through
// `times` times while a goes on.
void by_unit(const uint8_t* a, int64_t a_row, const uint8_t* b, int64_t b_step, int64_t b_apart,
             int64_t steps, int times, float* c, int64_t c_row, bool from_zero) {
    const int64_t c_bytes = c_row * 4, below = TILE_ROWS * c_row;
    settle();
    if (from_zero) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, c, c_bytes);
        _tile_loadd(1, c + 16, c_bytes);
        _tile_loadd(2, c + below, c_bytes);
        _tile_loadd(3, c + below + 16, c_bytes);
    }
    for (int time = 0; time < times; time++) {
        const uint8_t* from = b;
        for (int64_t s = 0; s < steps; s++, a += 64, from += b_step) {
            _tile_loadd(4, a, a_row);
            _tile_loadd(6, from, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, from + b_apart, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a + TILE_ROWS * a_row, a_row);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        a += (KEY_STEPS - steps) * 64;  // only shares are gone through twice: the second half of P
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    _tile_stored(2, c + below, c_bytes);
    _tile_stored(3, c + below + 16, c_bytes);
    settle();
}

// The same without the unit.
void by_pairs(const uint8_t* a, int64_t a_row, const uint8_t* b, int64_t b_step, int64_t b_apart,
              int64_t steps, int times, float* c, int64_t c_row, bool from_zero) {
    for (int time = 0; time < times; time++, a += KEY_STEPS * 64, from_zero = false)
        for (int64_t r = 0; r < 2 * TILE_ROWS; r += 8)
            pairs<8, 2>(a + r * a_row, a_row, 64, b, b_step, b_apart, steps, c + r * c_row, c_row, 16,
                        from_zero);
}

inline __m512i rounded(const float* numbers) {
    return _mm512_cvtepu16_epi32(narrow(_mm512_loadu_si512(numbers)));
}

// What a call works with; the sizes of the padded operands.
struct Room {
    int64_t nope, rope, v, steps;  // in multiples of 32; of a key's columns
    Panel latent, extra;           // of one block
    int64_t panel_bytes, cut;      // of both; blocks that are packed at a time
    uint8_t *panels, *weights, *keys, *values, *shares, *query;
    float *expanded, *scores, *state;

    Room(const PromptArgs& a, int64_t heads)
        : nope(padded(a.nope)), rope(padded(a.rope)), v(padded(a.v)), steps((nope + rope) / 32),
          latent{nullptr, KEYS, a.kv_lora, a.unit}, extra{nullptr, KEYS, a.rope, a.unit} {
        panel_bytes = Panel::bytes(KEYS, a.kv_lora) + Panel::bytes(KEYS, a.rope);
        cut = PACKED / panel_bytes > 1 ? PACKED / panel_bytes : 1;
        int64_t blocks = (a.end - a.first + KEYS - 1) / KEYS;
        if (cut > blocks) cut = blocks;
        const int64_t tall = nope > v ? nope : v;
        const int64_t sizes[] = {cut * panel_bytes, ROOM_BYTES, KEYS * (nope + rope) * 2, KEYS * v * 2,
                                 QUERY_ROWS * KEYS * 4, a.count * QUERY_ROWS * (nope + rope) * 2,
                                 tall * KEYS * 4, QUERY_ROWS * KEYS * 4,
                                 a.state ? 0 : heads * prompt_state(a.count, a.v) * 4};
        int64_t all = 0;
        for (int64_t size : sizes) all += (size + 63) / 64 * 64;
        auto at = static_cast<uint8_t*>(scratch(PROMPT_SCRATCH, size_t(all)));
        int i = 0;
        auto take = [&] {
            uint8_t* taken = at;
            at += (sizes[i++] + 63) / 64 * 64;
            return taken;
        };
        panels = take(), weights = take(), keys = take(), values = take(), shares = take();
        query = take();
        expanded = reinterpret_cast<float*>(take());
        scores = reinterpret_cast<float*>(take());
        state = reinterpret_cast<float*>(take());
    }

    Panel latents_of(int64_t i) const { return {panels + i * panel_bytes, KEYS, latent.k, latent.unit}; }
    Panel extras_of(int64_t i) const {
        return {panels + i * panel_bytes + Panel::bytes(KEYS, latent.k), KEYS, extra.k, extra.unit};
    }
};

struct Prompt {
    const PromptArgs& a;
    const Room& room;

    // Block number i of a cut, of which `held` rows hold a token; the others count as zeros.
    void pack(const uint16_t* block, int64_t i, int64_t held) const {
        const Panel latent = room.latents_of(i), extra = room.extras_of(i);
        for (int64_t t = 0; t < KEY_TILES; t++) {
            const uint16_t *c[TILE_ROWS], *e[TILE_ROWS];
            for (int64_t r = 0; r < TILE_ROWS; r++) {
                const int64_t row = t * TILE_ROWS + r;
                c[r] = row < held ? block + row * (a.kv_lora + a.rope) : nullptr;
                e[r] = c[r] ? c[r] + a.kv_lora : nullptr;
            }
            Tiles::pack_x(c, latent, t);
            if (a.rope) Tiles::pack_x(e, extra, t);
        }
    }

    // expanded = `rows` weight rows from `begin` on times the latents: tiles [rows / 16][16 of keys].
    void expand(int64_t begin, int64_t rows, const Panel& latent) const {
        const Weight up{W_BF16, reinterpret_cast<const uint8_t*>(a.up), nullptr,
                        a.heads * (a.nope + a.v), a.kv_lora};
        Tiles::multiply(up, begin, begin + rows, latent, room.expanded, room.weights);
    }

    const float* row(int64_t i, int64_t tile) const {  // of `expanded`, 16 keys
        return room.expanded + (i / TILE_ROWS * KEY_TILES + tile) * 256 + i % TILE_ROWS * 16;
    }

    // keys: for each 16 of them, step after step, pairs of columns for 16 keys.
    void pack_keys(const Panel& extra) const {
        const __m512i none = _mm512_setzero_si512();
        for (int64_t t = 0; t < KEY_TILES; t++) {
            uint8_t* to = room.keys + t * room.steps * TILE_BYTES;
            for (int64_t i = 0; i < room.nope; i += 2, to += 64) {
                const __m512i even = i < a.nope ? rounded(row(i, t)) : none;
                const __m512i odd = i + 1 < a.nope ? rounded(row(i + 1, t)) : none;
                _mm512_store_si512(to, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
            }
            for (int64_t b = 0; b < extra.blocks(); b++, to += DEPTH / TILE_COLUMNS * TILE_BYTES)
                std::memcpy(to, extra.at(b, t), size_t(extra.steps(b) * TILE_BYTES));
        }
    }

    // values: for each 32 keys, 16 values after 16 values, pairs of keys for them.
    void pack_values() const {
        for (int64_t s = 0; s < KEY_STEPS; s++)
            for (int64_t n = 0; n < room.v; n += 16) {
                __m512i r[16];
                for (int64_t i = 0; i < 16; i++) {
                    const bool is = n + i < a.v;
                    const __m256i low = is ? narrow(_mm512_loadu_si512(row(n + i, 2 * s)))
                                           : _mm256_setzero_si256();
                    const __m256i high = is ? narrow(_mm512_loadu_si512(row(n + i, 2 * s + 1)))
                                            : _mm256_setzero_si256();
                    r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
                }
                transpose(r);
                uint8_t* to = room.values + (s * room.v / 16 + n / 16) * TILE_BYTES;
                for (int64_t i = 0; i < 16; i++) _mm512_store_si512(to + 64 * i, r[i]);
            }
    }

    void pack_query(const PromptQuery& query, int64_t head, uint8_t* to) const {
        const int64_t wide = room.nope + room.rope, width = a.nope + a.rope;
        std::memset(to, 0, size_t(QUERY_ROWS * wide * 2));
        for (int64_t r = 0; r < query.rows; r++) {
            const uint16_t* from = query.q + (r * a.heads + head) * width;
            auto row = reinterpret_cast<uint16_t*>(to) + r * wide;
            std::memcpy(row, from, size_t(a.nope) * 2);
            std::memcpy(row + room.nope, from + a.nope, size_t(a.rope) * 2);
        }
    }

    // A row's scores of `seen` keys become shares, those of the others zero, and its running softmax
    // moves on.
    void share(const float* scores, int64_t seen, int64_t used, float& top, float& total, float* sums,
               uint16_t* to) const {
        alignas(64) float x[KEYS];
        const __m512 scale = _mm512_set1_ps(a.scale), never = _mm512_set1_ps(-INFINITY);
        __m512 most = _mm512_set1_ps(top);
        for (int64_t k = 0; k < used; k += 16) {
            const int64_t left = seen - k;
            const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
            const __m512 s = _mm512_mul_ps(_mm512_load_ps(scores + k), scale);
            const __m512 known = _mm512_mask_mov_ps(never, mask, s);
            _mm512_store_ps(x + k, known);
            most = _mm512_max_ps(known, most);  // the second where the first is NaN
        }
        const float now = _mm512_reduce_max_ps(most), base = std::isinf(now) ? 0.0f : now;
        for (int64_t k = 0; k < used; k++) x[k] = exp_(x[k] - base);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t k = 0; k < used; k += 16) {
            const __m512 p = _mm512_load_ps(x + k);
            const __m256i high = narrow(_mm512_castps_si512(p));
            const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
            const __m512 rest = _mm512_sub_ps(p, _mm512_castsi512_ps(wide));
            _mm256_store_si256(reinterpret_cast<__m256i*>(to + k), high);
            _mm256_store_si256(reinterpret_cast<__m256i*>(to + KEYS + k),
                               narrow(_mm512_castps_si512(rest)));
            sum = _mm512_add_ps(sum, p);
        }
        const float keep = exp_(top - base);
        const __m512 kept = _mm512_set1_ps(keep);
        total = total * keep + _mm512_reduce_add_ps(sum);
        top = now;
        for (int64_t i = 0; i < room.v; i += 16)
            _mm512_storeu_ps(sums + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), kept));
    }

    // `query` attends to the block of keys and values whose first token is `first`.
    void attend(const PromptQuery& query, const uint8_t* packed, int64_t first, float* state) const {
        const int64_t wide = (room.nope + room.rope) * 2, last = query.start + query.rows - first;
        const int64_t used = padded(last < KEYS ? last : KEYS), rows = padded(query.rows);
        float *tops = state, *totals = state + QUERY_ROWS, *sums = state + 2 * QUERY_ROWS;
        const auto product = a.unit ? by_unit : by_pairs;
        for (int64_t r = 0; r < rows; r += 32)
            for (int64_t k = 0; k < used; k += 32)
                product(packed + r * wide, wide, room.keys + k / 16 * room.steps * TILE_BYTES, TILE_BYTES,
                        room.steps * TILE_BYTES, room.steps, 1, room.scores + r * KEYS + k, KEYS, true);
        auto shares = reinterpret_cast<uint16_t*>(room.shares);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t seen = query.start + r - first + 1;
            if (r < query.rows && seen > 0)
                share(room.scores + r * KEYS, seen, used, tops[r], totals[r], sums + r * room.v,
                      shares + r * 2 * KEYS);
            else
                std::memset(shares + r * 2 * KEYS, 0, 4 * KEYS);
        }
        for (int64_t r = 0; r < rows; r += 32)
            for (int64_t i = 0; i < room.v; i += 32)
                product(room.shares + r * 4 * KEYS, 4 * KEYS, room.values + i / 16 * TILE_BYTES,
                        room.v / 16 * TILE_BYTES, TILE_BYTES, used / 32, 2,
                        sums + r * room.v + i, room.v, false);
    }

    void begin(float* state) const {
        for (int64_t r = 0; r < QUERY_ROWS; r++) state[r] = -INFINITY;
        std::memset(state + QUERY_ROWS, 0, size_t(QUERY_ROWS * (room.v + 1)) * sizeof(float));
    }

    void finish(const PromptQuery& query, int64_t head, const float* state) const {
        for (int64_t r = 0; r < query.rows; r++) {
            const float* sums = state + 2 * QUERY_ROWS + r * room.v;
            float* out = query.out + (r * a.heads + head) * a.v;
            for (int64_t i = 0; i < a.v; i++) out[i] = sums[i] / state[QUERY_ROWS + r];
        }
    }

    // One head over `blocks` packed ones, the first of them at token `first`.
    void head(int64_t number, int64_t first, int64_t blocks, float* state) const {
        const int64_t each = prompt_state(1, a.v), base = number * (a.nope + a.v);
        const int64_t packed = QUERY_ROWS * (room.nope + room.rope) * 2;
        int64_t last = 0;
        for (int64_t i = 0; i < a.count; i++) {
            const PromptQuery& query = a.queries[i];
            if (query.start + query.rows > last) last = query.start + query.rows;
            pack_query(query, number, room.query + i * packed);
        }
        for (int64_t b = 0; b < blocks && first < last; b++, first += KEYS) {
            expand(base, a.nope, room.latents_of(b));
            pack_keys(room.extras_of(b));
            expand(base + a.nope, a.v, room.latents_of(b));
            pack_values();
            for (int64_t i = 0; i < a.count; i++)
                if (first < a.queries[i].start + a.queries[i].rows)
                    attend(a.queries[i], room.query + i * packed, first, state + i * each);
        }
    }
};

}  // namespace

void mla_prompt(const PromptArgs& a, int64_t begin, int64_t end) {
    const Unit unit(a.unit);
    const Room room(a, end - begin);
    const Prompt prompt{a, room};
    const int64_t each = prompt_state(1, a.v);
    auto state = [&](int64_t head, int64_t query) {
        float* first = a.state ? a.state + head * a.count * each
                               : room.state + (head - begin) * a.count * each;
        return first + query * each;
    };
    if (a.begins)
        for (int64_t h = begin; h < end; h++)
            for (int64_t i = 0; i < a.count; i++) prompt.begin(state(h, i));
    int64_t done = 0;
    for (int64_t first = a.first; first < a.end; first += room.cut * KEYS) {
        int64_t blocks = 0;
        for (int64_t at = first; blocks < room.cut && at < a.end; at += KEYS, blocks++)
            prompt.pack(a.blocks[done + blocks], blocks, a.end - at < KEYS ? a.end - at : KEYS);
        for (int64_t h = begin; h < end; h++) prompt.head(h, first, blocks, state(h, 0));
        done += blocks;
    }
    if (a.ends)
        for (int64_t h = begin; h < end; h++)
            for (int64_t i = 0; i < a.count; i++) prompt.finish(a.queries[i], h, state(h, i));
}

}  // namespace k3

#endif
