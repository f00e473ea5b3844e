// Operators that treat each row (or channel) alone: norms, activations, attnres, routing, convolution.
#pragma once

#include "seq_vec.h"

namespace k3 {
namespace {

template <class T, class W>
void norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
    auto weight = static_cast<const W*>(a.weight);
    for (int64_t r = begin; r < end; r++) {
        auto x = static_cast<const T*>(a.x) + r * a.width;
        auto out = static_cast<T*>(a.out) + r * a.width;
        F scale = all(inverse_root(sum_of_squares(x, a.width) / float(a.width) + a.eps));
        groups(a.width, K3_GROUP {
            F w = load(weight + i, n);
            if constexpr (sizeof(W) > sizeof(T)) w = as<T>(w);
            // the released model rounds before it multiplies by the weight
            store(out + i, as<T>(load(x + i, n) * scale) * w, n);
        });
    }
}

void rms_norm(const NormArgs& a, int64_t begin, int64_t end) {
    if (a.weight_type == BF16)
        a.type == BF16 ? norm_rows<Bf16, Bf16>(a, begin, end) : norm_rows<float, Bf16>(a, begin, end);
    else
        a.type == BF16 ? norm_rows<Bf16, float>(a, begin, end) : norm_rows<float, float>(a, begin, end);
}

template <class T>
void glu_rows(const GluArgs& a, int64_t begin, int64_t end) {
    auto gate = static_cast<const T*>(a.gate), up = static_cast<const T*>(a.up);
    auto out = static_cast<T*>(a.out);
    float by_beta = 1 / a.beta, by_linear = 1 / a.linear_beta;
    groups((end - begin) * a.width, K3_GROUP {
        int64_t at = begin * a.width + i;
        F x = load(gate + at, n), y = load(up + at, n);
        F open = sigmoid(x);
        if (a.situ && a.capped) y = tanh(y * by_linear) * a.linear_beta;
        F curve = a.situ ? tanh(x * by_beta) * a.beta : x;
        store(out + at, curve * open * y, n);
    });
}

void glu(const GluArgs& a, int64_t begin, int64_t end) { K3_TYPED(a.type, glu_rows, a, begin, end); }

template <class T>
void open_rows(const OpenArgs& a, int64_t begin, int64_t end) {
    auto gate = static_cast<const T*>(a.gate);
    auto out = static_cast<T*>(a.out);
    groups((end - begin) * a.width, K3_GROUP {
        int64_t at = begin * a.width + i;
        store(out + at, load(a.x + at, n) * sigmoid(load(gate + at, n)), n);
    });
}

void output_gate(const OpenArgs& a, int64_t begin, int64_t end) {
    K3_TYPED(a.type, open_rows, a, begin, end);
}

// ---- attnres ----

// <entry's RMS norm, learned>; the norm's factor comes last, so that the entry is read once.
template <class T>
float mix_score(const MixArgs& a, const T* x, const float* learned) {
    F squares[4], products[4];
    for (int j = 0; j < 4; j++) squares[j] = products[j] = all(0);
    auto add = [&](int j, int64_t i, int64_t n) __attribute__((always_inline)) {
        F v = load(x + i, n);
        squares[j] = squares[j] + v * v;
        products[j] = products[j] + v * load(learned + i);
    };
    int64_t done = a.width / (4 * LANES) * (4 * LANES);
    for (int64_t i = 0; i < done; i += 4 * LANES)
        for (int j = 0; j < 4; j++) add(j, i + j * LANES, LANES);
    for (int j = 0; done < a.width; done += LANES, j++) add(j, done, a.width - done);
    float square = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    float product = sum((products[0] + products[1]) + (products[2] + products[3]));
    return product * inverse_root(square / float(a.width) + a.eps);
}

template <class T>
void mix_rows(const MixArgs& a, int64_t begin, int64_t end) {
    int64_t width = round_up(a.width);
    auto learned = static_cast<float*>(scratch(SEQ_SCRATCH, size_t(width + a.count) * sizeof(float)));
    float* shares = learned + width;
    groups(a.width, K3_GROUP {
        F scaled = load_as(a.norm, a.norm_type, i, n) * load_as(a.query, a.query_type, i, n);
        store(learned + i, scaled);
    });
    for (int64_t r = begin; r < end; r++) {
        auto entry = [&](int64_t j) { return static_cast<const T*>(a.entries[j]) + r * a.width; };
        float top = shares[0] = mix_score<T>(a, entry(0), learned), total = 0;
        for (int64_t j = 1; j < a.count; j++) {
            shares[j] = mix_score<T>(a, entry(j), learned);
            if (shares[j] > top) top = shares[j];
        }
        for (int64_t j = 0; j < a.count; j++) {
            shares[j] = exp(all(shares[j] - top)).v[0][0];
            total = j ? total + shares[j] : shares[j];
        }
        for (int64_t j = 0; j < a.count; j++) shares[j] /= total;
        auto out = static_cast<T*>(a.out) + r * a.width;
        groups(a.width, K3_GROUP {
            F mixed = load(entry(0) + i, n) * shares[0];
            for (int64_t j = 1; j < a.count; j++) mixed = mixed + load(entry(j) + i, n) * shares[j];
            store(out + i, mixed, n);
        });
    }
}

void attnres(const MixArgs& a, int64_t begin, int64_t end) {
    K3_TYPED(a.type, mix_rows, a, begin, end);
}

// ---- the running sum ----

template <class T>
void sum_rows(const AddArgs& a, int64_t begin, int64_t end) {
    auto base = static_cast<const T*>(a.base), y = static_cast<const T*>(a.y);
    auto more = static_cast<const T*>(a.more);
    auto out = static_cast<T*>(a.out);
    for (int64_t r = begin; r < end; r++) {
        I top = bits(all(0));
        groups(a.width, K3_GROUP {
            const int64_t at = r * a.width + i;
            F v = load(y + at, n);
            if (more) v = as<T>(v + load(more + at, n));
            if (base) v = as<T>(v + load(base + at, n));
            store(out + at, v, n);
            I size = bits(v);  // magnitudes sort as integers, NaN above infinity
            K3_EACH {
                size.v[p] = size.v[p] & INT32_MAX;
                top.v[p] = size.v[p] > top.v[p] ? size.v[p] : top.v[p];
            }
        });
        if (!a.peaks) continue;
        int32_t most = 0;
        K3_EACH for (int lane = 0; lane < K3_BYTES / 4; lane++)
            most = top.v[p][lane] > most ? top.v[p][lane] : most;
        memcpy(a.peaks + r, &most, sizeof most);
    }
}

void add(const AddArgs& a, int64_t begin, int64_t end) { K3_TYPED(a.type, sum_rows, a, begin, end); }

// ---- routing ----

// A number that sorts as the float does; NaN comes first, as in torch.sort(descending=True).
K3_INLINE uint32_t rank_of(float x) {
    if (x != x) return UINT32_MAX;
    x += 0.0f;  // -0 equals 0
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u >> 31 ? ~u : u | 0x80000000u;
}

void route(const RouteArgs& a, int64_t begin, int64_t end) {
    auto plain = static_cast<float*>(scratch(SEQ_SCRATCH, size_t(a.count + a.top_k) * sizeof(float)));
    auto ranks = reinterpret_cast<uint32_t*>(plain + a.count);
    for (int64_t r = begin; r < end; r++) {
        float* scores = a.scores + r * a.count;
        int64_t* chosen = a.experts + r * a.top_k;
        groups(a.count, K3_GROUP {
            F score = sigmoid(load(a.logits + r * a.count + i, n));
            store(plain + i, score, n);
            store(scores + i, score + load(a.bias + i, n), n);
        });
        int64_t used = 0;  // best first; a later expert passes an earlier one only if it is better
        for (int64_t e = 0; e < a.count; e++) {
            uint32_t rank = rank_of(scores[e]);
            if (used == a.top_k && rank <= ranks[used - 1]) continue;
            int64_t at = used < a.top_k ? used++ : used - 1;
            for (; at && ranks[at - 1] < rank; at--) ranks[at] = ranks[at - 1], chosen[at] = chosen[at - 1];
            ranks[at] = rank, chosen[at] = e;
        }
        for (int64_t i = 1; i < used; i++) {  // rising expert numbers
            int64_t e = chosen[i], at = i;
            for (; at && chosen[at - 1] > e; at--) chosen[at] = chosen[at - 1];
            chosen[at] = e;
        }
        float total = 0;
        for (int64_t i = 0; i < used; i++) total += plain[chosen[i]];
        for (int64_t i = 0; i < used; i++) {
            float share = plain[chosen[i]];
            if (a.renormalize) share /= total + 1e-20f;
            a.weights[r * a.top_k + i] = share * a.scale;
        }
    }
}

// ---- combine ----

// Sums in the order of an expert's number; products are rounded before they are added.
template <class T>
void combine_rows(const CombineArgs& a, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
        const int64_t* at = a.at + r * a.count;
        const float* weights = a.weights + r * a.count;
        auto out = static_cast<T*>(a.out) + r * a.width;
        groups(a.width, K3_GROUP {
            F total = all(0);
            for (int64_t j = 0; j < a.count; j++)
                total = total + load(static_cast<const T*>(a.x) + at[j] * a.width + i, n) * weights[j];
            store(out + i, total, n);
        });
    }
}

void combine(const CombineArgs& a, int64_t begin, int64_t end) {
    K3_TYPED(a.type, combine_rows, a, begin, end);
}

// ---- short_conv ----

// Channels [c, c + n) of all rows, n <= 16; `taps` holds their weights, [taps][16].
template <class T>
K3_INLINE void conv_lanes(const ConvArgs& a, int64_t c, int64_t n, const float* taps, float* out,
                          int64_t stride) {
    auto x = static_cast<const T*>(a.x) + c, tail = static_cast<const T*>(a.tail) + c;
    int64_t before = a.taps - 1;
    for (int64_t t = 0; t < a.rows; t++) {
        F y = all(0);
        for (int64_t j = 0; j < a.taps; j++) {
            int64_t row = t + j - before;
            const T* from = row < 0 ? tail + (row + before) * a.channels : x + row * a.channels;
            F term = load(taps + j * LANES) * load(from, n);
            y = j ? y + term : term;
        }
        store(out + t * stride, as<T>(y * sigmoid(y)), n);
    }
}

// `taps` of n <= 16 channels, lane by lane: [taps][16], zero beyond n.
K3_INLINE void spread_taps(const float* weight, int64_t n, int64_t taps, float* to) {
    for (int64_t j = 0; j < taps; j++)
        for (int64_t i = 0; i < LANES; i++) to[j * LANES + i] = i < n ? weight[i * taps + j] : 0;
}

// Channels [first, last) into `out`, whose rows are `stride` apart; then their tail moves on, in
// place if `moved` is `tail`.
template <class T>
void conv_channels(const ConvArgs& a, int64_t first, int64_t last, float* out, int64_t stride) {
    auto taps = static_cast<float*>(scratch(SEQ_SCRATCH, size_t(a.taps * LANES) * sizeof(float)));
    for (int64_t c = first; c < last; c += LANES) {
        int64_t n = last - c < LANES ? last - c : LANES;
        const float* weight = a.weight + c * a.taps;
        float* to = out + (c - first);
        if (n == LANES && a.taps == 4) {  // the compiler knows how to turn a block of this shape
            spread_taps(weight, LANES, 4, taps);
            conv_lanes<T>(a, c, LANES, taps, to, stride);
        } else {
            spread_taps(weight, n, a.taps, taps);
            conv_lanes<T>(a, c, n, taps, to, stride);
        }
    }
    for (int64_t j = 0; j < a.taps - 1; j++) {  // the last taps - 1 of tail and rows
        int64_t row = a.rows + j - (a.taps - 1);
        auto x = static_cast<const T*>(a.x), tail = static_cast<const T*>(a.tail);
        const T* from = row < 0 ? tail + (a.rows + j) * a.channels : x + row * a.channels;
        memcpy(static_cast<T*>(a.moved) + j * a.channels + first, from + first,
               size_t(last - first) * sizeof(T));
    }
}

template <class T>
void conv_groups(const ConvArgs& a, int64_t begin, int64_t end) {
    int64_t first = begin * CONV_GROUP;
    int64_t last = end * CONV_GROUP < a.channels ? end * CONV_GROUP : a.channels;
    conv_channels<T>(a, first, last, a.out + first, a.channels);
}

void short_conv(const ConvArgs& a, int64_t begin, int64_t end) {
    K3_TYPED(a.type, conv_groups, a, begin, end);
}

// ---- the pointwise parts of a KDA layer ----

// The log decay of one head for one token; lower 0: the unbounded gate.
template <class T>
K3_INLINE void gate_head(const T* raw, const float* bias, float rate, float lower, int64_t dim,
                         float* out) {
    groups(dim, K3_GROUP {
        F z = load(raw + i, n) + load(bias + i, n);
        F y;
        if (lower != 0)
            y = sigmoid(all(rate) * z) * lower;
        else  // beyond 20 the softplus of z is z
            y = (all(0) - all(rate)) * choose(less(all(20.0f), z), z, log1p(exp(z)));
        store(out + i, y, n);
    });
}

template <class T>
void gate_rows(const GateArgs& a, int64_t begin, int64_t end) {
    auto rates = static_cast<float*>(scratch(SEQ_SCRATCH, size_t(round_up(a.heads)) * sizeof(float)));
    groups(a.heads, K3_GROUP { store(rates + i, exp(load(a.a_log + i, n))); });
    for (int64_t at = begin * a.heads * a.dim, h = 0; at < end * a.heads * a.dim; at += a.dim) {
        gate_head(static_cast<const T*>(a.raw) + at, a.dt_bias + h * a.dim, rates[h], a.lower, a.dim,
                  a.out + at);
        h = h + 1 == a.heads ? 0 : h + 1;
    }
}

void kda_gate(const GateArgs& a, int64_t begin, int64_t end) {
    K3_TYPED(a.type, gate_rows, a, begin, end);
}

void l2_norm(const UnitArgs& a, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
        const float* x = a.x + r * a.dim;
        F scale = all(inverse_root(sum_of_squares(x, a.dim) + a.eps));
        groups(a.dim, K3_GROUP { store(a.out + r * a.dim + i, load(x + i, n) * scale, n); });
    }
}

template <class T>
K3_INLINE void gated_head(const float* x, const T* gate, const float* weight, float eps, int64_t dim,
                          T* out) {
    F scale = all(inverse_root(sum_of_squares(x, dim) / float(dim) + eps));
    groups(dim, K3_GROUP {
        F normed = load(x + i, n) * scale * load(weight + i, n);
        store(out + i, normed * sigmoid(load(gate + i, n)), n);
    });
}

template <class T>
void gated_rows(const GatedNormArgs& a, int64_t begin, int64_t end) {
    for (int64_t h = begin * a.heads; h < end * a.heads; h++)
        gated_head(a.x + h * a.dim, static_cast<const T*>(a.gate) + h * a.dim, a.weight, a.eps, a.dim,
                   static_cast<T*>(a.out) + h * a.dim);
}

void gated_norm(const GatedNormArgs& a, int64_t begin, int64_t end) {
    K3_TYPED(a.type, gated_rows, a, begin, end);
}

}  // namespace
}  // namespace k3
