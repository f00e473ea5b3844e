// The gated delta rule of Kimi Delta Attention, head by head (kernels/kda_reference.py has the formulas).
#pragma once

#include <initializer_list>

#include "seq_vec.h"

namespace k3 {
namespace {

// Register tiles; they never change the order of a sum.
constexpr int TILE_ROWS = K3_BYTES == 64 ? 4 : 2;
constexpr int TILE_COLS = K3_BYTES == 64 ? 4 : K3_BYTES == 32 ? 2 : 1;
constexpr int STEP_COLS = K3_BYTES == 64 ? 8 : K3_BYTES == 32 ? 4 : 2;

// ---- one token ----

// Columns [c, c + 16 N) of one head, the last group holding `last` of its 16: one pass reads the
// decayed state for the error, one moves it on while it lies in the first caches.
template <int N>
void step_columns(const float* decay, const float* q, const float* k, const float* v, float beta,
                  float* state, float* out, int64_t dk, int64_t dv, int64_t last) {
    auto width = [&](int j) { return j == N - 1 ? last : LANES; };
    F seen[2][N], result[2][N];
    for (int j = 0; j < N; j++) seen[0][j] = seen[1][j] = result[0][j] = result[1][j] = all(0);
    for (int64_t d = 0; d < dk; d += 2)
        for (int64_t e = 0; e < 2 && d + e < dk; e++)
            for (int j = 0; j < N; j++) {
                F s = load(state + (d + e) * dv + j * LANES, width(j)) * decay[d + e];
                seen[e][j] = fused(k[d + e], s, seen[e][j]);
            }
    F error[N];
    for (int j = 0; j < N; j++) error[j] = load(v + j * LANES, width(j)) - (seen[0][j] + seen[1][j]);
    for (int64_t d = 0; d < dk; d += 2)
        for (int64_t e = 0; e < 2 && d + e < dk; e++) {
            float strength = beta * k[d + e];
            for (int j = 0; j < N; j++) {
                float* at = state + (d + e) * dv + j * LANES;
                F s = fused(strength, error[j], load(at, width(j)) * decay[d + e]);
                store(at, s, width(j));
                result[e][j] = fused(q[d + e], s, result[e][j]);
            }
        }
    for (int j = 0; j < N; j++) store(out + j * LANES, result[0][j] + result[1][j], width(j));
}

void kda_step(const KdaArgs& a, int64_t begin, int64_t end) {
    FlushTiny flush;
    auto decay = static_cast<float*>(scratch(SEQ_SCRATCH, size_t(round_up(a.dk)) * sizeof(float)));
    for (int64_t h = begin; h < end; h++) {
        const float *q = a.q + h * a.dk, *k = a.k + h * a.dk, *v = a.v + h * a.dv;
        float *state = a.state + h * a.dk * a.dv, *out = a.out + h * a.dv, beta = a.beta[h];
        groups(a.dk, K3_GROUP { store(decay + i, exp(load(a.g + h * a.dk + i, n))); });
        int64_t c = 0;
        for (; c + STEP_COLS * LANES <= a.dv; c += STEP_COLS * LANES)
            step_columns<STEP_COLS>(decay, q, k, v + c, beta, state + c, out + c, a.dk, a.dv, LANES);
        for (; c < a.dv; c += LANES)
            step_columns<1>(decay, q, k, v + c, beta, state + c, out + c, a.dk, a.dv, a.dv - c);
    }
}

// ---- a chunk ----

// c[M][16 N] = c scaled by `scale` for each row (null: as it is) + a[M][depth] b[depth][16 N].
template <int M, int N>
K3_INLINE void multiply_tile(const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                             int64_t ldc, int64_t depth, const float* scale) {
    F acc[M][N];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            acc[i][j] = load(c + i * ldc + j * LANES);
            if (scale) acc[i][j] = acc[i][j] * scale[i];
        }
    for (int64_t d = 0; d < depth; d++) {
        F row[N];
        for (int j = 0; j < N; j++) row[j] = load(b + d * ldb + j * LANES);
        for (int i = 0; i < M; i++) {
            F factor = all(a[i * lda + d]);
            for (int j = 0; j < N; j++) acc[i][j] = fused(factor, row[j], acc[i][j]);
        }
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) store(c + i * ldc + j * LANES, acc[i][j]);
}

// The same for any multiples of 16; rows of a and c are lda and ldc apart, of b ldb.
void multiply(int64_t rows, int64_t cols, int64_t depth, const float* a, int64_t lda, const float* b,
              int64_t ldb, float* c, int64_t ldc, const float* scale = nullptr) {
    for (int64_t j = 0; j < cols;) {
        bool wide = j + TILE_COLS * LANES <= cols;
        for (int64_t i = 0; i < rows; i += TILE_ROWS) {
            const float* factor = scale ? scale + i : nullptr;
            if (wide)
                multiply_tile<TILE_ROWS, TILE_COLS>(a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc,
                                                    depth, factor);
            else
                multiply_tile<TILE_ROWS, 1>(a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, depth,
                                            factor);
        }
        j += wide ? TILE_COLS * LANES : LANES;
    }
}

constexpr int64_t SUB = 16;     // tokens of a sub-block: one vector of them
constexpr int64_t MOST = 64;    // tokens of a chunk

// Scratch of one head.  K, V: dk and dv rounded up to 16, the rest zero.  A sub-block has 32 rows in
// `near`, `far`, `pairs` and `values`: first those of k (negative), then those of q.
struct Chunk {
    int64_t K, V;
    float *state;                  // [K][V]
    float *k, *q, *decay;          // [16][K] each: this sub-block's keys, queries and e^g
    float *near, *far;             // [32][K]: times the decay since the sub-block / chunk began
    float *carried;                // [K][64]: keys times the decay from their token to the last one
    float *sums, *block, *before;  // [K]: running sum of g, this sub-block's decay, all earlier ones'
    float *pairs;                  // [32][64]
    float *values;                 // [32][V]: u and o
    float *update;                 // [64][V]: beta u

    Chunk(int64_t dk, int64_t dv) : K(round_up(dk)), V(round_up(dv)) {
        int64_t floats = K * V + 3 * SUB * K + 4 * SUB * K + K * MOST + 3 * K + 2 * SUB * MOST +
                         2 * SUB * V + MOST * V;
        auto at = static_cast<float*>(scratch(SEQ_SCRATCH, size_t(floats) * sizeof(float)));
        auto take = [&](int64_t n) { return at += n, at - n; };
        state = take(K * V);
        k = take(SUB * K), q = take(SUB * K), decay = take(SUB * K);
        near = take(2 * SUB * K), far = take(2 * SUB * K);
        carried = take(K * MOST);
        sums = take(K), block = take(K), before = take(K);
        pairs = take(2 * SUB * MOST);
        values = take(2 * SUB * V), update = take(MOST * V);
    }
};

void copy_row(float* to, const float* from, int64_t n, int64_t padded) {
    for (int64_t i = 0; i < padded; i += LANES) store(to + i, i < n ? load(from + i, n - i) : all(0));
}

// Fills the sub-block's [16][K] arrays from token `first` on, and near and far.
void gather(const KdaArgs& a, const Chunk& c, int64_t h, int64_t first, int64_t count) {
    int64_t K = c.K;
    size_t size = size_t(K) * sizeof(float);
    memset(c.sums, 0, size);
    for (int64_t s = 0; s < SUB; s++) {
        float *k = c.k + s * K, *q = c.q + s * K;
        if (s >= count) {
            memset(k, 0, size), memset(q, 0, size);
            for (int64_t row : {s, SUB + s})
                memset(c.near + row * K, 0, size), memset(c.far + row * K, 0, size);
            continue;
        }
        int64_t at = ((first + s) * a.heads + h) * a.dk;
        copy_row(k, a.k + at, a.dk, K);
        copy_row(q, a.q + at, a.dk, K);
        for (int64_t d = 0; d < K; d += LANES) {
            F g = d < a.dk ? load(a.g + at + d, a.dk - d) : all(0);
            F total = load(c.sums + d) + g, since = exp(total), before = load(c.before + d);
            store(c.sums + d, total);
            store(c.decay + s * K + d, exp(g));
            F key = (all(0) - load(k + d)) * since, query = load(q + d) * since;
            store(c.near + s * K + d, key);
            store(c.near + (SUB + s) * K + d, query);
            store(c.far + s * K + d, key * before);
            store(c.far + (SUB + s) * K + d, query * before);
        }
    }
    groups(K, K3_GROUP { store(c.block + i, exp(load(c.sums + i, n))); });
}

// Pairs inside the sub-block at column `at`.  Lane r follows the key of token r, decayed token by
// token as the recurrence itself does; in the end it has decayed to the sub-block's last token.
void inner_pairs(const Chunk& c, int64_t at, int64_t count) {
    F lane;
    for (int r = 0; r < SUB; r++) lane.v[r * PARTS / SUB][r % (SUB / PARTS)] = float(r);
    for (int64_t d = 0; d < c.K; d++) {
        float column[SUB];
        for (int64_t r = 0; r < SUB; r++) column[r] = c.k[r * c.K + d];
        memcpy(c.carried + d * MOST + at, column, sizeof column);
    }
    for (int64_t s = 0; s < count; s++) {
        const float *k = c.k + s * c.K, *q = c.q + s * c.K, *decay = c.decay + s * c.K;
        I earlier = less(lane, all(float(s))), until = less(lane, all(float(s + 1)));
        F by_key[4], by_query[4];
        for (int j = 0; j < 4; j++) by_key[j] = by_query[j] = all(0);
        for (int64_t d = 0; d < c.K; d += 4)
            for (int j = 0; j < 4; j++) {
                float* key = c.carried + (d + j) * MOST + at;
                F now = load(key);
                now = choose(earlier, now * decay[d + j], now);
                store(key, now);
                by_key[j] = fused(k[d + j], now, by_key[j]);
                by_query[j] = fused(q[d + j], now, by_query[j]);
            }
        F ks = (by_key[0] + by_key[1]) + (by_key[2] + by_key[3]);
        F qs = (by_query[0] + by_query[1]) + (by_query[2] + by_query[3]);
        store(c.pairs + s * MOST + at, choose(earlier, all(0) - ks, all(0)));
        store(c.pairs + (SUB + s) * MOST + at, choose(until, qs, all(0)));
    }
}

// Forward substitution inside the sub-block, then its outputs; only earlier tokens are looked at.
void substitute(const KdaArgs& a, const Chunk& c, int64_t h, int64_t first, int64_t count) {
    float* update = c.update + first * c.V;
    auto add_earlier = [&](float* row, const float* pairs, int64_t tokens, float* to, float beta) {
        for (int64_t j = 0; j < c.V; j += LANES) {
            F x = load(row + j);
            for (int64_t r = 0; r < tokens; r++) x = fused(pairs[r], load(update + r * c.V + j), x);
            store(to + j, x * beta);
        }
    };
    for (int64_t s = 0; s < SUB; s++) {
        float* to = update + s * c.V;
        if (s >= count) {
            memset(to, 0, size_t(c.V) * sizeof(float));
            continue;
        }
        const float* pairs = c.pairs + s * MOST + first;
        add_earlier(c.values + s * c.V, pairs, s, to, a.beta[(first + s) * a.heads + h]);
        float* o = c.values + (SUB + s) * c.V;
        add_earlier(o, pairs + SUB * MOST, s + 1, o, 1.0f);
        float* out = a.out + ((first + s) * a.heads + h) * a.dv;
        groups(a.dv, K3_GROUP { store(out + i, load(o + i), n); });
    }
}

// Multiplies the keys of tokens [0, tokens) by the present sub-block's decay.
void decay_carried(const Chunk& c, int64_t tokens) {
    for (int64_t d = 0; d < c.K; d++)
        for (int64_t t = 0; t < tokens; t += LANES) {
            float* key = c.carried + d * MOST + t;
            store(key, load(key) * c.block[d]);
        }
}

void chunk_head(const KdaArgs& a, const Chunk& c, int64_t h) {
    float* state = a.state + h * a.dk * a.dv;
    for (int64_t d = 0; d < c.K; d++)
        d < a.dk ? copy_row(c.state + d * c.V, state + d * a.dv, a.dv, c.V)
                 : copy_row(c.state + d * c.V, nullptr, 0, c.V);
    for (int64_t d = 0; d < c.K; d++) c.before[d] = 1;
    for (int64_t first = 0; first < a.rows; first += SUB) {
        int64_t count = a.rows - first < SUB ? a.rows - first : SUB;
        gather(a, c, h, first, count);
        memset(c.pairs, 0, size_t(2 * SUB * MOST) * sizeof(float));
        multiply(2 * SUB, first, c.K, c.near, c.K, c.carried, MOST, c.pairs, MOST);
        inner_pairs(c, first, count);
        memset(c.values, 0, size_t(2 * SUB * c.V) * sizeof(float));
        for (int64_t s = 0; s < count; s++)
            copy_row(c.values + s * c.V, a.v + ((first + s) * a.heads + h) * a.dv, a.dv, c.V);
        multiply(2 * SUB, c.V, c.K, c.far, c.K, c.state, c.V, c.values, c.V);
        multiply(2 * SUB, c.V, first, c.pairs, MOST, c.update, c.V, c.values, c.V);
        substitute(a, c, h, first, count);
        decay_carried(c, first);
        for (int64_t d = 0; d < c.K; d++) c.before[d] *= c.block[d];
    }
    multiply(c.K, c.V, (a.rows + SUB - 1) / SUB * SUB, c.carried, MOST, c.update, c.V, c.state, c.V,
             c.before);
    for (int64_t d = 0; d < a.dk; d++)
        groups(a.dv, K3_GROUP { store(state + d * a.dv + i, load(c.state + d * c.V + i), n); });
}

void kda_chunk(const KdaArgs& a, int64_t begin, int64_t end) {
    FlushTiny flush;
    Chunk c(a.dk, a.dv);
    for (int64_t h = begin; h < end; h++) chunk_head(a, c, h);
}

}  // namespace
}  // namespace k3
