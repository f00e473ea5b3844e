// The C functions of the operators in seq.h: fill in the arguments, choose the table, share out items.
//
// Each returns what k3_run does: 0, or 1 when scratch memory ran out.  Work that is over before another
// thread would have woken stays with the caller.

#include <new>
#include <vector>

#include "mla_tiles.h"
#include "seq.h"
#include "words.h"

namespace k3 {
namespace {

const SeqOps& ops() {
#if defined(__x86_64__)
    if (isa() >= AVX512) return SEQ_AVX512;
    if (isa() == AVX2) return SEQ_AVX2;
#endif
    return SEQ_PORTABLE;
}

template <class Args>
struct Share {
    void (*f)(const Args&, int64_t, int64_t);
    const Args* args;
    int64_t items, grain;

    static void part(void* context, int64_t index) {
        auto s = static_cast<const Share*>(context);
        int64_t begin = index * s->grain, end = begin + s->grain;
        s->f(*s->args, begin, end < s->items ? end : s->items);
    }
};

// f for all items in parts of `grain`.
template <class Args>
int share(Pool* pool, void (*f)(const Args&, int64_t, int64_t), const Args& args, int64_t items,
          int64_t grain) {
    Share<Args> shared{f, &args, items, grain};
    return k3_run(pool, Share<Args>::part, &shared, (items + grain - 1) / grain);
}

// The same, in parts of about 20 us if an item takes `ns`, or in one where others could not help.
template <class Args>
int share_rows(Pool* pool, void (*f)(const Args&, int64_t, int64_t), const Args& args, int64_t items,
               double ns) {
    int64_t grain = ns >= 20e3 ? 1 : int64_t(20e3 / (ns + 1)) + 1;
    return share(pool, f, args, items, double(items) * ns < WORTH_WAKING_NS ? items + 1 : grain);
}

}  // namespace
}  // namespace k3

using namespace k3;

K3_API int k3_rms_norm(Pool* pool, int type, int weight_type, int64_t rows, int64_t width, float eps,
                       const void* x, const void* weight, void* out) {
    NormArgs args{x, weight, out, width, eps, Dtype(type), Dtype(weight_type)};
    return share_rows(pool, ops().rms_norm, args, rows, 0.2 * double(width));
}

// linear_beta 0: the up branch has no cap.
K3_API int k3_situ(Pool* pool, int type, int64_t rows, int64_t width, float beta, float linear_beta,
                   const void* gate, const void* up, void* out) {
    GluArgs args{gate, up, out, width, beta, linear_beta, true, linear_beta != 0, Dtype(type)};
    return share_rows(pool, ops().glu, args, rows, 4.0 * double(width));
}

K3_API int k3_silu(Pool* pool, int type, int64_t rows, int64_t width, const void* gate, const void* up,
                   void* out) {
    GluArgs args{gate, up, out, width, 1, 1, false, false, Dtype(type)};
    return share_rows(pool, ops().glu, args, rows, 1.5 * double(width));
}

K3_API int k3_attnres(Pool* pool, int type, int norm_type, int query_type, int64_t count, int64_t rows,
                      int64_t width, float eps, const void* const* entries, const void* norm,
                      const void* query, void* out) {
    MixArgs args{entries, norm, query, out, count, width, eps, Dtype(type), Dtype(norm_type),
                 Dtype(query_type)};
    return share_rows(pool, ops().attnres, args, rows, 0.5 * double(width * count));
}

K3_API int k3_route(Pool* pool, int64_t rows, int64_t count, int64_t top_k, int renormalize,
                    float scale, const float* logits, const float* bias, float* scores,
                    int64_t* experts, float* weights) {
    RouteArgs args{logits, bias, scores, experts, weights, count, top_k, scale, renormalize != 0};
    return share_rows(pool, ops().route, args, rows, 3.0 * double(count));
}

// chosen may be null.
K3_API int k3_codes(Pool* pool, int64_t rows, int64_t count, int64_t top_k, int64_t best_k, int64_t far,
                    const float* scores, const int64_t* chosen, uint16_t* best, uint8_t* codes) {
    CodesArgs args{scores, chosen, best, codes, count, top_k, best_k, far};
    return share_rows(pool, ops().codes, args, rows, 4.0 * double(count));
}

K3_API int k3_combine(Pool* pool, int type, int64_t rows, int64_t count, int64_t width, const void* x,
                      const int64_t* at, const float* weights, void* out) {
    CombineArgs args{x, at, weights, out, count, width, Dtype(type)};
    return share_rows(pool, ops().combine, args, rows, 0.2 * double(count * width));
}

// out = base + (y + more), each sum rounded; base and more may be null, and peaks.
K3_API int k3_add(Pool* pool, int type, int64_t rows, int64_t width, const void* base, const void* y,
                  const void* more, void* out, float* peaks) {
    AddArgs args{base, y, more, out, peaks, width, Dtype(type)};
    return share_rows(pool, ops().add, args, rows, 0.3 * double(width));
}

// out = x * sigmoid(gate), of the gate's type.
K3_API int k3_output_gate(Pool* pool, int type, int64_t rows, int64_t width, const float* x,
                          const void* gate, void* out) {
    OpenArgs args{x, gate, out, width, Dtype(type)};
    return share_rows(pool, ops().output_gate, args, rows, 0.6 * double(width));
}

K3_API int k3_short_conv(Pool* pool, int type, int64_t rows, int64_t channels, int64_t taps,
                         const void* x, const void* tail, const float* weight, float* out,
                         void* moved) {
    ConvArgs args{x, tail, weight, out, moved, rows, channels, taps, Dtype(type)};
    int64_t groups = (channels + CONV_GROUP - 1) / CONV_GROUP;
    return share_rows(pool, ops().short_conv, args, groups, double(CONV_GROUP * (rows + taps)));
}

// lower 0: the unbounded gate.
K3_API int k3_kda_gate(Pool* pool, int type, int64_t rows, int64_t heads, int64_t dim, float lower,
                       const void* raw, const float* a_log, const float* dt_bias, float* out) {
    GateArgs args{raw, a_log, dt_bias, out, heads, dim, lower, Dtype(type)};
    return share_rows(pool, ops().kda_gate, args, rows, 1.5 * double(heads * dim));
}

K3_API int k3_l2_norm(Pool* pool, int64_t vectors, int64_t dim, float eps, const float* x, float* out) {
    UnitArgs args{x, out, dim, eps};
    return share_rows(pool, ops().l2_norm, args, vectors, 0.3 * double(dim));
}

K3_API int k3_gated_norm(Pool* pool, int type, int64_t rows, int64_t heads, int64_t dim, float eps,
                         const float* x, const void* gate, const float* weight, void* out) {
    GatedNormArgs args{x, gate, weight, out, heads, dim, eps, Dtype(type)};
    return share_rows(pool, ops().gated_norm, args, rows, 1.5 * double(heads * dim));
}

K3_API int k3_kda_step(Pool* pool, int64_t heads, int64_t dk, int64_t dv, const float* q,
                       const float* k, const float* v, const float* g, const float* beta,
                       float* state, float* out) {
    KdaArgs args{q, k, v, g, beta, state, out, 1, heads, dk, dv};
    return share_rows(pool, ops().kda_step, args, heads, 0.6 * double(dk * dv));
}

K3_API int k3_kda_chunk(Pool* pool, int64_t rows, int64_t heads, int64_t dk, int64_t dv, const float* q,
                        const float* k, const float* v, const float* g, const float* beta,
                        float* state, float* out) {
    KdaArgs args{q, k, v, g, beta, state, out, rows, heads, dk, dv};
    return share_rows(pool, ops().kda_chunk, args, heads, 0.07 * double(dk * dv * (rows + 16)));
}

// places: addresses of x, tail and weight of q, k and v in turn, then those of raw, beta, gate, a_log,
// dt_bias, norm, state and out.
K3_API int k3_kda_mixer(Pool* pool, int type, int step, int64_t rows, int64_t heads, int64_t dim,
                        int64_t taps, float lower, float scale, float unit_eps, float eps,
                        void* const* places) {
    MixerArgs a{};
    for (int j = 0; j < 3; j++) {
        a.x[j] = places[3 * j], a.tail[j] = places[3 * j + 1];
        a.weight[j] = static_cast<const float*>(places[3 * j + 2]);
    }
    auto floats = [&](int i) { return static_cast<float*>(places[i]); };
    a.raw = places[9], a.beta = places[10], a.gate = places[11];
    a.a_log = floats(12), a.dt_bias = floats(13), a.norm = floats(14), a.state = floats(15);
    a.out = places[16];
    a.rows = rows, a.heads = heads, a.dim = dim, a.taps = taps;
    a.lower = lower, a.scale = scale, a.unit_eps = unit_eps, a.eps = eps;
    a.step = step != 0, a.type = Dtype(type);
    double ns = step ? 0.6 * double(dim) : 0.07 * double(dim * (rows + 16));
    return share_rows(pool, ops().kda_mixer, a, heads, double(dim) * (ns + 6.0 * double(rows)));
}

// heads_each: heads that share a reading of the latents.  part: 1 begins, 2 ends, 3 is all there is.
K3_API int k3_mla_decode(Pool* pool, int type, int block_type, int up_type, int part, int64_t heads,
                         int64_t heads_each, int64_t block_rows, int64_t length, int64_t nope,
                         int64_t rope, int64_t v, int64_t kv_lora, float scale, const void* q,
                         const void* const* blocks, const void* up, float* out, float* lse,
                         float* state) {
    MlaArgs args{q, blocks, up, out, lse, state, heads, block_rows, length, nope, rope, v, kv_lora,
                 scale, (part & 1) != 0, (part & 2) != 0, Dtype(type), Dtype(block_type),
                 Dtype(up_type)};
    double ns = 0.1 * double((nope + v) * kv_lora) + 0.05 * double(length * (2 * kv_lora + rope));
    bool alone = ns * double(heads) < WORTH_WAKING_NS;
    return share(pool, ops().mla_decode, args, heads, alone ? heads : heads_each);
}

#if !defined(__x86_64__)
void k3::mla_prompt(const PromptArgs&, int64_t, int64_t) {}  // nothing else has tiles
#endif

// fields: for each query the addresses of q and out, its rows and its position.  heads_each, part: as of
// k3_mla_decode; state: k3_mla_prompt_state numbers.
K3_API int k3_mla_prompt(Pool* pool, int part, int64_t heads, int64_t heads_each, int64_t first,
                         int64_t end, int64_t nope, int64_t rope, int64_t v, int64_t kv_lora, float scale,
                         int64_t count, const int64_t* fields, const void* const* blocks,
                         const void* up, float* state) {
    try {
        std::vector<PromptQuery> queries;
        for (int64_t i = 0; i < count; i++, fields += 4)
            queries.push_back({reinterpret_cast<const uint16_t*>(fields[0]),
                               reinterpret_cast<float*>(fields[1]), fields[2], fields[3]});
        PromptArgs args{queries.data(), reinterpret_cast<const uint16_t* const*>(blocks),
                        static_cast<const uint16_t*>(up), state, count, first, end, heads, nope, rope, v,
                        kv_lora, scale, (part & 1) != 0, (part & 2) != 0, isa() == AMX};
        return share(pool, mla_prompt, args, heads, heads_each);
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// floats: codes are E4M3.  scales, codes: where they begin in a row of `row` bytes.
K3_API int k3_unpack_latents(Pool* pool, int type, int floats, int64_t rows, int64_t block_rows,
                             int64_t row, int64_t scales, int64_t codes, int64_t kv_lora,
                             int64_t rope, const void* const* blocks, void* out) {
    UnpackArgs args{blocks, out, block_rows, row, scales, codes, kv_lora, rope, floats != 0,
                    Dtype(type)};
    return share_rows(pool, ops().unpack_latents, args, rows, 0.15 * double(kv_lora + rope));
}

K3_BY_WORDS(k3_rms_norm)
K3_BY_WORDS(k3_situ)
K3_BY_WORDS(k3_silu)
K3_BY_WORDS(k3_attnres)
K3_BY_WORDS(k3_route)
K3_BY_WORDS(k3_combine)
K3_BY_WORDS(k3_add)
K3_BY_WORDS(k3_output_gate)
K3_BY_WORDS(k3_short_conv)
K3_BY_WORDS(k3_kda_gate)
K3_BY_WORDS(k3_l2_norm)
K3_BY_WORDS(k3_gated_norm)
K3_BY_WORDS(k3_kda_step)
K3_BY_WORDS(k3_kda_chunk)
K3_BY_WORDS(k3_kda_mixer)
K3_BY_WORDS(k3_mla_decode)
K3_BY_WORDS(k3_mla_prompt)
K3_BY_WORDS(k3_unpack_latents)
