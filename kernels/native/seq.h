// The operators beside linear: their arguments and the table that one file per instruction set fills.
//
// Each operator does items [begin, end) of its arguments: rows, heads or groups of channels.  An item's
// bits depend on that item alone.  Dense arrays are row-major; sizes are numbers of elements.
#pragma once

#include "native.h"

namespace k3 {

struct NormArgs {  // items: rows
    const void *x, *weight;
    void* out;
    int64_t width;
    float eps;
    Dtype type, weight_type;
};

struct GluArgs {  // items: rows
    const void *gate, *up;
    void* out;
    int64_t width;
    float beta, linear_beta;
    bool situ, capped;
    Dtype type;
};

struct MixArgs {  // items: rows
    const void* const* entries;
    const void *norm, *query;
    void* out;
    int64_t count, width;
    float eps;
    Dtype type, norm_type, query_type;
};

struct RouteArgs {  // items: rows
    const float *logits, *bias;
    float* scores;  // by which they are chosen
    int64_t* experts;
    float* weights;
    int64_t count, top_k;
    float scale;
    bool renormalize;
};

struct CombineArgs {  // items: rows of the result
    const void* x;      // [.., width]: results of experts in any order
    const int64_t* at;  // [rows, count]: which of them belong to a row
    const float* weights;
    void* out;
    int64_t count, width;
    Dtype type;
};

struct AddArgs {  // items: rows
    const void *base, *y, *more;  // base and more may be null
    void* out;
    float* peaks;  // [rows], the largest magnitude of a row of out, NaN if it holds one; or null
    int64_t width;
    Dtype type;
};

struct OpenArgs {  // items: rows
    const float* x;
    const void* gate;
    void* out;
    int64_t width;
    Dtype type;  // of gate and out
};

constexpr int64_t CONV_GROUP = 64;  // channels of an item of short_conv

struct ConvArgs {  // items: groups of CONV_GROUP channels
    const void *x, *tail;
    const float* weight;
    float* out;
    void* moved;
    int64_t rows, channels, taps;
    Dtype type;
};

struct GateArgs {  // items: rows
    const void* raw;
    const float *a_log, *dt_bias;
    float* out;
    int64_t heads, dim;
    float lower;  // 0: the unbounded gate
    Dtype type;
};

struct UnitArgs {  // items: vectors of `dim` numbers
    const float* x;
    float* out;
    int64_t dim;
    float eps;
};

struct GatedNormArgs {  // items: rows
    const float* x;
    const void* gate;
    const float* weight;
    void* out;
    int64_t heads, dim;
    float eps;
    Dtype type;
};

struct KdaArgs {  // items: heads
    const float *q, *k, *v, *g, *beta;
    float *state, *out;
    int64_t rows, heads, dk, dv;
};

// What lies between the projections of a KDA layer, one sequence's rows.  dk = dv = dim.
struct MixerArgs {  // items: heads
    const void* x[3];       // q, k, v [rows, heads dim]
    void* tail[3];          // [taps - 1, heads dim], moves on
    const float* weight[3];  // [heads dim, taps]
    const void *raw, *beta, *gate;  // [rows, heads dim], [rows, heads], [rows, heads dim]
    const float *a_log, *dt_bias, *norm;
    float* state;  // [heads, dim, dim], moves on
    void* out;     // [rows, heads dim]
    int64_t rows, heads, dim, taps;
    float lower, scale, unit_eps, eps;  // scale of q; eps of l2_norm and gated_norm
    bool step;  // one token by kda_step, else kda_chunk
    Dtype type;
};

// One piece of a sequence's latents, `length` of them in `blocks`.
struct MlaArgs {  // items: heads
    const void* q;
    const void* const* blocks;
    const void* up;
    float *out, *lse;
    float* state;  // carried from piece to piece; null if there is only one.  For each head its query
                   // and its context in multiples of 16 numbers, running maximum and sum
    int64_t heads, block_rows, length, nope, rope, v, kv_lora;
    float scale;
    bool begins, ends;  // the first piece, the last one
    Dtype type, block_type, up_type;
};

// Packed latents (kernels/latent_format.py) to numbers.
struct UnpackArgs {  // items: rows
    const void* const* blocks;
    void* out;                         // [rows, kv_lora + rope]
    int64_t block_rows, row;           // rows of a block, bytes of a packed row
    int64_t scales, codes;             // where they begin in a row, in bytes
    int64_t kv_lora, rope;
    bool floats;  // codes are E4M3, else signed integers
    Dtype type;
};

// Router scores in 8 bits, and the best of each row.
struct CodesArgs {  // items: rows
    const float* scores;    // [rows, count]
    const int64_t* chosen;  // [rows, top_k], which come before all others; or null
    uint16_t* best;         // [rows, best_k]: experts
    uint8_t* codes;         // [rows, best_k]
    int64_t count, top_k, best_k, far;  // far: so many scores are higher than the one of code 0
};

struct SeqOps {
    void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);
    void (*glu)(const GluArgs&, int64_t begin, int64_t end);
    void (*attnres)(const MixArgs&, int64_t begin, int64_t end);
    void (*route)(const RouteArgs&, int64_t begin, int64_t end);
    void (*codes)(const CodesArgs&, int64_t begin, int64_t end);
    void (*combine)(const CombineArgs&, int64_t begin, int64_t end);
    void (*add)(const AddArgs&, int64_t begin, int64_t end);
    void (*output_gate)(const OpenArgs&, int64_t begin, int64_t end);
    void (*short_conv)(const ConvArgs&, int64_t begin, int64_t end);
    void (*kda_gate)(const GateArgs&, int64_t begin, int64_t end);
    void (*l2_norm)(const UnitArgs&, int64_t begin, int64_t end);
    void (*gated_norm)(const GatedNormArgs&, int64_t begin, int64_t end);
    void (*kda_step)(const KdaArgs&, int64_t begin, int64_t end);
    void (*kda_chunk)(const KdaArgs&, int64_t begin, int64_t end);
    void (*kda_mixer)(const MixerArgs&, int64_t begin, int64_t end);
    void (*mla_decode)(const MlaArgs&, int64_t begin, int64_t end);
    void (*unpack_latents)(const UnpackArgs&, int64_t begin, int64_t end);
};

extern const SeqOps SEQ_PORTABLE;  // on ARM this is NEON
#if defined(__x86_64__)
extern const SeqOps SEQ_AVX2, SEQ_AVX512;
#endif

constexpr int SEQ_SCRATCH = 8;  // first of our slots of k3::scratch

}  // namespace k3
