// All operators of seq.h, compiled for the instruction set of the including file.
#pragma once

#include "seq_codes.h"
#include "seq_kda.h"
#include "seq_latents.h"
#include "seq_mixer.h"
#include "seq_mla.h"
#include "seq_rows.h"

#define K3_SEQ_OPS                                                                             \
    {k3::rms_norm, k3::glu,         k3::attnres,    k3::route,    k3::codes,   k3::combine,    \
     k3::add,      k3::output_gate, k3::short_conv, k3::kda_gate, k3::l2_norm, k3::gated_norm, \
     k3::kda_step, k3::kda_chunk,   k3::kda_mixer,  k3::mla_decode, k3::unpack_latents}
