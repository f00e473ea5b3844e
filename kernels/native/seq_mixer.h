// All of a KDA layer between its projections, head by head, while a head's numbers lie in the caches.
// Same operations in the same order as short_conv, l2_norm, kda_gate, kda and gated_norm alone.
#pragma once

#include "seq_kda.h"
#include "seq_rows.h"

namespace k3 {
namespace {

constexpr int MIXER_SCRATCH = SEQ_SCRATCH + 1;

// What one head is given: [rows][dim] each, and beta [rows].
struct MixerHead {
    float *qkv[3], *g, *out, *beta;

    explicit MixerHead(const MixerArgs& a) {
        int64_t each = a.rows * a.dim;
        auto at = static_cast<float*>(
            scratch(MIXER_SCRATCH, size_t(5 * each + round_up(a.rows)) * sizeof(float)));
        for (float*& part : qkv) part = at, at += each;
        g = at, out = at + each, beta = out + each;
    }
};

template <class T>
void mix_head(const MixerArgs& a, const MixerHead& m, int64_t h) {
    int64_t first = h * a.dim, width = a.heads * a.dim;
    for (int j = 0; j < 3; j++) {
        ConvArgs conv{a.x[j], a.tail[j], a.weight[j], nullptr, a.tail[j], a.rows, width, a.taps, a.type};
        conv_channels<T>(conv, first, first + a.dim, m.qkv[j], a.dim);
    }
    for (int j = 0; j < 2; j++) l2_norm({m.qkv[j], m.qkv[j], a.dim, a.unit_eps}, 0, a.rows);
    groups(a.rows * a.dim, K3_GROUP {
        store(m.qkv[0] + i, load(m.qkv[0] + i, n) * a.scale, n);
    });
    float rate = exp(all(a.a_log[h])).v[0][0];
    for (int64_t t = 0; t < a.rows; t++) {
        gate_head(static_cast<const T*>(a.raw) + t * width + first, a.dt_bias + first, rate, a.lower,
                  a.dim, m.g + t * a.dim);
        m.beta[t] = sigmoid(load(static_cast<const T*>(a.beta) + t * a.heads + h, 1)).v[0][0];
    }
    KdaArgs kda{m.qkv[0], m.qkv[1], m.qkv[2], m.g, m.beta, a.state + h * a.dim * a.dim, m.out,
                a.rows, 1, a.dim, a.dim};
    a.step ? kda_step(kda, 0, 1) : kda_chunk(kda, 0, 1);
    for (int64_t t = 0; t < a.rows; t++)
        gated_head(m.out + t * a.dim, static_cast<const T*>(a.gate) + t * width + first, a.norm, a.eps,
                   a.dim, static_cast<T*>(a.out) + t * width + first);
}

template <class T>
void mix_heads(const MixerArgs& a, int64_t begin, int64_t end) {
    MixerHead m(a);
    for (int64_t h = begin; h < end; h++) mix_head<T>(a, m, h);
}

void kda_mixer(const MixerArgs& a, int64_t begin, int64_t end) {
    K3_TYPED(a.type, mix_heads, a, begin, end);
}

}  // namespace
}  // namespace k3
