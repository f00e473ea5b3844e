// Attention of one decode token over latent blocks, in the absorbed form
// (kernels/mla_decode_reference.py has the formulas).
#pragma once

#include "seq_vec.h"

namespace k3 {
namespace {

constexpr int64_t MLA_HEADS = 16;  // heads that share a reading of the latents

// Register tiles: heads, and tokens or vectors of a context.  They never change the order of a sum.
constexpr int TALL = K3_BYTES == 64 ? 8 : K3_BYTES == 32 ? 4 : 2;
constexpr int BROAD = K3_BYTES == 64 ? 2 : 1;

// Scratch for up to MLA_HEADS heads; rows have multiples of 16 numbers, zero beyond the last.
struct Attention {
    int64_t width, L, C, S;  // kv_lora + rope; the same, kv_lora and a block's rows rounded up
    float *query;            // [heads][L]
    float *context;          // [heads][C]
    float *scores;           // [heads][S]
    float top[MLA_HEADS], total[MLA_HEADS], keep[MLA_HEADS];

    explicit Attention(const MlaArgs& a)
        : width(a.kv_lora + a.rope), L(round_up(width)), C(round_up(a.kv_lora)),
          S(round_up(a.block_rows)) {
        size_t floats = size_t(MLA_HEADS * (L + C + S));
        query = static_cast<float*>(scratch(SEQ_SCRATCH, floats * sizeof(float)));
        context = query + MLA_HEADS * L;
        scores = context + MLA_HEADS * C;
    }

    // Where a head's query and context lie from one piece to the next, and top and total behind them.
    void carry(const MlaArgs& a, int64_t first) {
        query = a.state + first * L;
        context = a.state + a.heads * L + first * C;
    }
    float* sums(const MlaArgs& a, int64_t head) const { return a.state + a.heads * (L + C) + 2 * head; }
};

// query += q times M rows of W_k, in order.
template <int M, class W>
K3_INLINE void lift_tile(const W* up, int64_t width, const float* q, float* query) {
    groups(width, K3_GROUP {
        F x = load(query + i);
        for (int r = 0; r < M; r++) x = fused(q[r], load(up + r * width + i, n), x);
        store(query + i, x);
    });
}

// query = [W_k^T q | q_e] of one head.
template <class W>
void lift(const MlaArgs& a, const Attention& t, int64_t head, float* query) {
    auto up = static_cast<const W*>(a.up) + head * (a.nope + a.v) * a.kv_lora;
    int64_t q = head * (a.nope + a.rope), i = 0;
    auto own = [&](int64_t at, int64_t n) { return load_as(a.q, a.type, q + at, n); };
    memset(query, 0, size_t(t.L) * sizeof(float));
    for (float eight[LANES]; i < a.nope; i += 8) {
        const W* rows = up + i * a.kv_lora;
        int64_t left = a.nope - i;
        store(eight, own(i, left < 8 ? left : 8));
        if (left >= 8)
            lift_tile<8>(rows, a.kv_lora, eight, query);
        else
            for (int64_t r = 0; r < left; r++)
                lift_tile<1>(rows + r * a.kv_lora, a.kv_lora, eight + r, query);
    }
    groups(a.rope, K3_GROUP { store(query + a.kv_lora + i, own(a.nope + i, n), n); });
}

// scores[M][N] = scale * <query of a head, latent of a token>.
template <int M, int N, class T>
K3_INLINE void score_tile(const MlaArgs& a, const Attention& t, int64_t head, const T* keys,
                          int64_t token) {
    F acc[M][N];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) acc[i][j] = all(0);
    for (int64_t l = 0; l < t.width; l += LANES) {
        F key[N];
        for (int j = 0; j < N; j++) key[j] = load(keys + (token + j) * t.width + l, t.width - l);
        for (int i = 0; i < M; i++) {
            F q = load(t.query + (head + i) * t.L + l);
            for (int j = 0; j < N; j++) acc[i][j] = fused(q, key[j], acc[i][j]);
        }
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) t.scores[(head + i) * t.S + token + j] = sum(acc[i][j]) * a.scale;
}

// context[M][16 N] = context * keep + scores (now shares) times latents, tokens in order.  Meanwhile
// the same place of the `next` block comes from memory.
template <int M, int N, class T>
K3_INLINE void context_tile(const MlaArgs& a, const Attention& t, int64_t head, const T* keys,
                            const T* next, int64_t tokens, int64_t c) {
    F acc[M][N];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) acc[i][j] = all(0);
    for (int64_t k = 0; k < tokens; k++) {
        if (next) __builtin_prefetch(next + k * t.width + c, 0, 2);
        F key[N];
        for (int j = 0; j < N; j++)
            key[j] = load(keys + k * t.width + c + j * LANES, N > 1 ? LANES : a.kv_lora - c);
        for (int i = 0; i < M; i++) {
            F share = all(t.scores[(head + i) * t.S + k]);
            for (int j = 0; j < N; j++) acc[i][j] = fused(share, key[j], acc[i][j]);
        }
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            float* at = t.context + (head + i) * t.C + c + j * LANES;
            store(at, fused(load(at), all(t.keep[head + i]), acc[i][j]));
        }
}

// Turns a head's scores into shares and moves its running maximum and sum on.
void to_shares(Attention& t, int64_t head, int64_t tokens) {
    float *scores = t.scores + head * t.S, top = t.top[head];
    for (int64_t k = 0; k < tokens; k++) top = scores[k] > top ? scores[k] : top;
    F sums = all(0);
    groups(tokens, K3_GROUP {
        store(scores + i, exp(load(scores + i, n) - top));
        sums = sums + load(scores + i, n);
    });
    t.keep[head] = exp(all(t.top[head] - top)).v[0][0];
    t.total[head] = t.total[head] * t.keep[head] + sum(sums);
    t.top[head] = top;
}

// One block for `heads` heads from `head` on, M at a time as long as there are so many.
template <int M, class T>
void attend(const MlaArgs& a, Attention& t, int64_t head, int64_t heads, const T* keys,
            const T* next, int64_t tokens) {
    for (; heads >= M; head += M, heads -= M) {
        int64_t k = 0, c = 0;
        for (; k + BROAD <= tokens; k += BROAD) score_tile<M, BROAD>(a, t, head, keys, k);
        for (; k < tokens; k++) score_tile<M, 1>(a, t, head, keys, k);
        for (int64_t h = head; h < head + M; h++) to_shares(t, h, tokens);
        for (; c + BROAD * LANES <= a.kv_lora; c += BROAD * LANES)
            context_tile<M, BROAD>(a, t, head, keys, next, tokens, c);
        for (; c < a.kv_lora; c += LANES) context_tile<M, 1>(a, t, head, keys, next, tokens, c);
        next = nullptr;
    }
    if constexpr (M > 1)
        if (heads) attend<M / 2>(a, t, head, heads, keys, next, tokens);
}

template <class T>
void attend_blocks(const MlaArgs& a, Attention& t, int64_t heads) {
    int64_t done = 0;
    for (int64_t b = 0; done < a.length; b++, done += a.block_rows) {
        int64_t left = a.length - done, full = a.block_rows;
        // of a last block that is not full nothing is touched ahead
        auto next = left >= 2 * full ? static_cast<const T*>(a.blocks[b + 1]) : nullptr;
        attend<TALL>(a, t, 0, heads, static_cast<const T*>(a.blocks[b]), next, left < full ? left : full);
    }
}

// out[M] = rows of W_v times context / total.
template <int M, class W>
K3_INLINE void lower_tile(const W* up, int64_t width, const float* context, float total, float* out) {
    F acc[M];
    for (int r = 0; r < M; r++) acc[r] = all(0);
    groups(width, K3_GROUP {
        for (int r = 0; r < M; r++)
            acc[r] = fused(load(up + r * width + i, n), load(context + i), acc[r]);
    });
    for (int r = 0; r < M; r++) out[r] = sum(acc[r]) / total;
}

template <class W>
void lower(const MlaArgs& a, int64_t head, const float* context, float total) {
    auto up = static_cast<const W*>(a.up) + (head * (a.nope + a.v) + a.nope) * a.kv_lora;
    float* out = a.out + head * a.v;
    int64_t i = 0;
    for (; i + 4 <= a.v; i += 4) lower_tile<4>(up + i * a.kv_lora, a.kv_lora, context, total, out + i);
    for (; i < a.v; i++) lower_tile<1>(up + i * a.kv_lora, a.kv_lora, context, total, out + i);
}

// Some heads over one piece: begun with the first one, finished with the last one.
void mla_decode(const MlaArgs& a, int64_t begin, int64_t end) {
    Attention t(a);
    for (int64_t first = begin; first < end; first += MLA_HEADS) {
        int64_t heads = end - first < MLA_HEADS ? end - first : MLA_HEADS;
        if (a.state) t.carry(a, first);
        for (int64_t h = 0; h < heads; h++) {
            if (a.begins) {
                float* query = t.query + h * t.L;
                K3_TYPED(a.up_type, lift, a, t, first + h, query);
                t.top[h] = -__builtin_inff(), t.total[h] = 0;
            } else {
                const float* sums = t.sums(a, first + h);
                t.top[h] = sums[0], t.total[h] = sums[1];
            }
        }
        if (a.begins) memset(t.context, 0, size_t(heads * t.C) * sizeof(float));
        K3_TYPED(a.block_type, attend_blocks, a, t, heads);
        for (int64_t h = 0; h < heads; h++) {
            if (a.ends) {
                K3_TYPED(a.up_type, lower, a, first + h, t.context + h * t.C, t.total[h]);
                a.lse[first + h] = t.top[h] + log(all(t.total[h])).v[0][0];
            } else {
                float* sums = t.sums(a, first + h);
                sums[0] = t.top[h], sums[1] = t.total[h];
            }
        }
    }
}

}  // namespace
}  // namespace k3
