// Dot products of the family ROWS, written once for every instruction set.
//
// A set S brings LANES, PER_LANE (columns that a lane of x holds), Vec, load, dot, fma, sum and one decoder a
// number format:
//   COLUMNS   columns of a chunk: VECTORS x LANES x PER_LANE
//   SCALED    whether a chunk's sum is multiplied by its scale before it joins the total
//   INTERLEAVE  x is laid out so that lane i of vector j holds column INTERLEAVE * i + j, because
//             decoders unpack a machine word of INTERLEAVE columns by shifts, lane by lane
//   load(p, columns, s)   the chunk's bytes (columns < COLUMNS: the last chunk of a row, nothing
//             beyond it is read), s its scales; vec(j) decodes vector j, scale() the scales.
// One output is a chain over the chunks of its row in rising order, then S::sum: the blocking below
// only decides which chains run side by side.
#pragma once

#include "linear.h"
#include "vecmath.h"

namespace k3 {
namespace {

template <class D>
int64_t padded(int64_t k) {
    return (k + D::COLUMNS - 1) / D::COLUMNS * D::COLUMNS;
}

inline float widened(Dtype dtype, const void* x, int64_t i) {
    if (dtype == F32) return static_cast<const float*>(x)[i];
    uint16_t h = static_cast<const uint16_t*>(x)[i];
    return dtype == BF16 ? from_bf16(h) : from_f16(h);
}

template <class D>
void prepare_from(Dtype dtype, const void* x, int64_t begin, int64_t k, float* out) {
    constexpr int LANES = D::COLUMNS / D::VECTORS, GROUP = LANES * D::INTERLEAVE;
    for (int64_t i = begin; i < padded<D>(k); i++) {
        int64_t inside = i % GROUP;
        int64_t place = i - inside + inside % D::INTERLEAVE * LANES + inside / D::INTERLEAVE;
        out[place] = i < k ? widened(dtype, x, i) : 0.0f;
    }
}

constexpr int64_t W_ROWS = 8;          // weight rows that meet it there
constexpr int BLOCKED = 4;             // from so many rows of x on; fewer cost less than the cuts

// Into the first cache (3) or the second (2).  GCC takes a function with nothing but a prefetch for
// one without effect and drops its calls, unless they are inlined at once.
template <int CACHE = 3>
__attribute__((always_inline)) inline void prefetch(const uint8_t* p) {
    __builtin_prefetch(p, 0, CACHE);
}

// Columns [from, to) of RB rows of x times W rows of the weight, `apart` rows from one another.
// `kept` [W][RB] has the totals between runs of columns; with the last column they become `out`.
template <class S, class D, int RB, int W>
void tile(const Weight& w, int64_t first, int64_t apart, const float* const* x, int64_t from,
          int64_t to, typename S::Vec* kept, float* out, int64_t stride) {
    using Vec = typename S::Vec;
    constexpr bool HELD = !D::SCALED || RB == 1 || S::ROOMY;  // totals in registers, not in `kept`
    const int64_t row = w.row_bytes();
    const uint8_t *p[W], *s[W];
    Vec total[RB][W];
    for (int i = 0; i < W; i++) {
        p[i] = w.row(first + i * apart) + from / D::COLUMNS * D::BYTES;
        s[i] = D::SCALED ? w.row_scale(first + i * apart) + from / D::COLUMNS * D::SCALE_BYTES
                         : nullptr;
        for (int r = 0; r < RB; r++) {
            if (HELD)
                total[r][i] = from ? kept[i * RB + r] : S::zero();
            else if (!from)
                kept[i * RB + r] = S::zero();
        }
    }
    const auto chunk = [&](int64_t c, int64_t columns) __attribute__((always_inline)) {
        D d[W];
        Vec part[RB][W];
#pragma GCC unroll 4
        for (int i = 0; i < W; i++) {
            if (RB < BLOCKED) prefetch(p[i] + S::AHEAD);
            if (RB > 1) prefetch<2>(p[i] + W_ROWS * row);  // the rows that come next
            d[i].load(p[i], columns, s[i]);
        }
#pragma GCC unroll 16
        for (int j = 0; j < D::VECTORS; j++) {
            Vec v[W];
#pragma GCC unroll 4
            for (int i = 0; i < W; i++) v[i] = d[i].vec(j);
#pragma GCC unroll 8
            for (int r = 0; r < RB; r++) {
                Vec a = S::load(x[r] + c / S::PER_LANE + j * S::LANES);
                if (W > 1) S::pin(a);  // loaded once, and not by every fma
#pragma GCC unroll 4
                for (int i = 0; i < W; i++)
                    if (!D::SCALED)
                        total[r][i] = S::dot(v[i], a, total[r][i]);
                    else
                        part[r][i] = j ? S::dot(v[i], a, part[r][i]) : S::mul(v[i], a);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < W; i++) {
            if (D::SCALED) {
                Vec factor = d[i].scale();
#pragma GCC unroll 8
                for (int r = 0; r < RB; r++)
                    if (HELD)
                        total[r][i] = S::fma(part[r][i], factor, total[r][i]);
                    else
                        kept[i * RB + r] = S::fma(part[r][i], factor, kept[i * RB + r]);
                s[i] += D::SCALE_BYTES;
            }
            p[i] += D::BYTES;
        }
    };
    int64_t c = from;
    for (; c + D::COLUMNS <= to; c += D::COLUMNS) chunk(c, D::COLUMNS);
    if (c < to) chunk(c, to - c);
    for (int r = 0; r < RB; r++)
        for (int i = 0; i < W; i++)
            if (to == w.k)
                out[r * stride + i * apart] = S::sum(HELD ? total[r][i] : kept[i * RB + r]);
            else if (HELD)
                kept[i * RB + r] = total[r][i];
}

// W streams of weight rows, each contiguous in memory.
template <class S, class D, int RB>
void rows_block(const Weight& w, int64_t begin, int64_t end, const float* const* x, float* out,
                int64_t stride) {
    constexpr int W = S::template side_by_side<D>(RB);
    typename S::Vec kept[RB == 1 ? 1 : W_ROWS * RB];
    constexpr int64_t MOST = S::X_BYTES * S::PER_LANE / (4 * RB) / D::COLUMNS * D::COLUMNS;
    const int64_t columns = RB < BLOCKED ? w.k : MOST;
    const int64_t apart = (end - begin) / W;
    for (int64_t from = 0; from < w.k; from += columns) {
        const int64_t to = from + columns < w.k ? from + columns : w.k;
        for (int64_t i = 0; i < apart; i++)
            tile<S, D, RB, W>(w, begin + i, apart, x, from, to, kept + i * W * RB, out + i, stride);
        for (int64_t i = begin + W * apart; i < end; i++)
            tile<S, D, RB, 1>(w, i, 0, x, from, to, kept + (i - begin) * RB, out + (i - begin),
                              stride);
    }
}

template <class S, class D>
void few_rows(const Weight& w, int64_t begin, int64_t end, const float* const* x, int64_t rows,
              float* out, int64_t stride) {
    switch (rows) {
        case 1: return rows_block<S, D, 1>(w, begin, end, x, out, stride);
        case 2: return rows_block<S, D, 2>(w, begin, end, x, out, stride);
        case 3: return rows_block<S, D, 3>(w, begin, end, x, out, stride);
        case 4: return rows_block<S, D, 4>(w, begin, end, x, out, stride);
        case 5: return rows_block<S, D, 5>(w, begin, end, x, out, stride);
        case 6: return rows_block<S, D, 6>(w, begin, end, x, out, stride);
        case 7: return rows_block<S, D, 7>(w, begin, end, x, out, stride);
        default: return rows_block<S, D, 8>(w, begin, end, x, out, stride);
    }
}

template <class S, class D>
void dot_kind(const Weight& w, int64_t begin, int64_t end, const float* const* x, int64_t rows,
              float* out, int64_t stride) {
    // Eight weight rows at a time stay in the first cache while they meet every row of x.
    const int64_t step = rows > 1 ? W_ROWS : end - begin, groups = (rows + S::ROWS - 1) / S::ROWS;
    for (int64_t b = begin; b < end; b += step) {
        const int64_t e = b + step < end ? b + step : end;
        for (int64_t g = 0; g < groups; g++) {  // of nearly the same size
            const int64_t r = rows * g / groups, some = rows * (g + 1) / groups - r;
            few_rows<S, D>(w, b, e, x + r, some, out + (b - begin) + r * stride, stride);
        }
    }
}

template <class S>
void dot(const Weight& w, int64_t begin, int64_t end, const float* const* x, int64_t rows,
         float* out, int64_t stride) {
    switch (w.kind) {
        case W_F32: return dot_kind<S, typename S::F32>(w, begin, end, x, rows, out, stride);
        case W_BF16: return dot_kind<S, typename S::Bf16>(w, begin, end, x, rows, out, stride);
        case W_F16: return dot_kind<S, typename S::F16>(w, begin, end, x, rows, out, stride);
        case W_INT8: return dot_kind<S, typename S::Int8>(w, begin, end, x, rows, out, stride);
        case W_MXFP4: return dot_kind<S, typename S::Mxfp4>(w, begin, end, x, rows, out, stride);
    }
}

template <class S>
int64_t width(Kind kind, int64_t k) {
    switch (kind) {
        case W_F32: return padded<typename S::F32>(k);
        case W_BF16: return padded<typename S::Bf16>(k);
        case W_F16: return padded<typename S::F16>(k);
        case W_INT8: return padded<typename S::Int8>(k);
        default: return padded<typename S::Mxfp4>(k);
    }
}

template <class S>
void prepare(Kind kind, Dtype dtype, const void* x, int64_t k, float* out) {
    const int64_t done = S::prepare_most(kind, dtype, x, k, out);
    switch (kind) {
        case W_F32: return prepare_from<typename S::F32>(dtype, x, done, k, out);
        case W_BF16: return prepare_from<typename S::Bf16>(dtype, x, done, k, out);
        case W_F16: return prepare_from<typename S::F16>(dtype, x, done, k, out);
        case W_INT8: return prepare_from<typename S::Int8>(dtype, x, done, k, out);
        case W_MXFP4: return prepare_from<typename S::Mxfp4>(dtype, x, done, k, out);
    }
}

inline void store(Dtype dtype, const float* in, int64_t n, void* out) {
    if (dtype == F32) {
        std::memcpy(out, in, size_t(n) * 4);
        return;
    }
    auto* to = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < n; i++) to[i] = to_bf16(in[i]);
}

inline float rounded(float f) { return from_bf16(to_bf16(f)); }

inline void activate(const Activation& act, Dtype dtype, float* gate, float* up, int64_t n,
                     void* out) {
    if (dtype == BF16)
        for (int64_t i = 0; i < n; i++) gate[i] = rounded(gate[i]), up[i] = rounded(up[i]);
    const float beta = act.beta, cap = act.linear_beta;
    if (act.name == 0)
        for (int64_t i = 0; i < n; i++) gate[i] = gate[i] * sigmoid_(gate[i]) * up[i];
    else if (cap == 0)
        for (int64_t i = 0; i < n; i++)
            gate[i] = beta * tanh_(gate[i] / beta) * sigmoid_(gate[i]) * up[i];
    else
        for (int64_t i = 0; i < n; i++)
            gate[i] = beta * tanh_(gate[i] / beta) * sigmoid_(gate[i]) * (cap * tanh_(up[i] / cap));
    store(dtype, gate, n, out);
}

template <class S>
constexpr RowKernels kernels() {
    return {width<S>, prepare<S>, dot<S>, store, activate};
}

}  // namespace
}  // namespace k3
