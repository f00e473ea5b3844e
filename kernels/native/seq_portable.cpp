// The operators of seq.h for 16-byte registers: SSE2 on x86, NEON on ARM.
#define K3_BYTES 16
#include "seq_table.h"

const k3::SeqOps k3::SEQ_PORTABLE = K3_SEQ_OPS;
