// Attention of prompt rows over latent blocks in bfloat16 tiles
// (kernels/mla_prefill_reference.py has the formulas).
#pragma once

#include "native.h"

namespace k3 {

struct PromptQuery {
    const uint16_t* q;  // [rows, heads, nope + rope]
    float* out;         // [rows, heads, v]
    int64_t rows, start;  // at most 64; position of the first
};

// One piece of a sequence's latents: the tokens [first, end) in blocks [256, kv_lora + rope].
struct PromptArgs {  // items: heads
    const PromptQuery* queries;
    const uint16_t* const* blocks;
    const uint16_t* up;  // [heads (nope + v), kv_lora]
    float* state;        // carried from piece to piece, prompt_state numbers a head; null if there is only one
    int64_t count, first, end, heads, nope, rope, v, kv_lora;
    float scale;
    bool begins, ends;  // the first piece, the last one
    bool unit;          // as of Panel
};

// Numbers that a head's running softmax takes: for each query and row its maximum, sum and shares.
inline int64_t prompt_state(int64_t queries, int64_t v) {
    return queries * 64 * ((v + 31) / 32 * 32 + 2);
}

void mla_prompt(const PromptArgs& args, int64_t begin, int64_t end);

}  // namespace k3
